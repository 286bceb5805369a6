"""The snippets of the documents: each says whether it is a whole file, whole ones work, and parts fit in."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from shared.credentials.certificates.authority import Authority

ROOT = Path(__file__).parent.parent

WHOLE = "# hgate.yaml, a whole file"
PART = "# a part of hgate.yaml"
OTHER = "# for kubectl apply"
"""How a snippet begins."""

_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMENTED = re.compile(r"^(?P<indent> *)# (?P<field>[a-z_]+: \S.*)$")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block of YAML in a document."""

    document: str
    text: str

    def __str__(self) -> str:
        lines = self.text.splitlines()
        return f"{self.document}: {lines[0].lstrip('# ')}: {lines[1].partition(':')[0]}"

    @property
    def begins(self) -> str:
        return self.text.partition("\n")[0]


def snippets(*beginnings: str) -> list[Snippet]:
    """Those of all documents, that begin so."""
    found = [
        Snippet(str(path.relative_to(ROOT)), text)
        for path in (ROOT / "README.md", *sorted((ROOT / "deploy").rglob("*.md")), *ROOT.glob("docs/**/*.md"))
        for text in _BLOCK.findall(path.read_text())
    ]
    return [snippet for snippet in found if not beginnings or snippet.begins.startswith(beginnings)]


def check(text: str, folder: Path) -> str:
    """What is wrong with it as the gateway's file, by `hgate --check`; empty: nothing."""
    (folder / "hgate.yaml").write_text(text)
    command = [sys.executable, "-m", "gateway", "--config", str(folder / "hgate.yaml"), "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return ran.stderr if ran.returncode else ""


def test_every_snippet_says_what_it_is() -> None:
    told = snippets(WHOLE, PART, OTHER)
    assert [str(snippet) for snippet in snippets() if snippet not in told] == []
    assert len(snippets(WHOLE)) >= 3


@pytest.mark.parametrize("snippet", snippets(WHOLE), ids=str)
def test_a_whole_file_works(snippet: Snippet, tmp_path: Path) -> None:
    assert check(snippet.text, tmp_path) == ""


@pytest.mark.parametrize("snippet", snippets(PART), ids=str)
def test_a_part_fits_into_the_first_file(snippet: Snippet, tmp_path: Path) -> None:
    whole = yaml.safe_load(snippets(WHOLE)[0].text)
    part = yaml.safe_load(snippet.text)
    for name, fields in part.items():
        whole[name] = {**whole[name], **fields} if name in whole else fields
    rules = whole.get("hbone", {})
    if rules:  # a part of `hbone` has only what it is about
        rules.setdefault("certificates", "/var/run/secrets/workload-spiffe-credentials")
        rules.setdefault("rules", [])
    assert check(yaml.safe_dump(whole), tmp_path) == ""


def uncommented(text: str) -> list[tuple[str, str]]:
    """The text with one of its commented fields at a time in effect, and that field."""
    lines = text.splitlines()
    found = []
    for at, line in enumerate(lines):
        match = _COMMENTED.fullmatch(line)
        if match is None:
            continue
        indent, field, end = match["indent"], match["field"], at + 1
        while field.partition(" #")[0].count("{") > field.count("}"):  # it goes on in the next line
            field += lines[end].replace("#", "", 1)
            end += 1
        name = f"{indent}{field.partition(':')[0]}:"
        before, after = (
            [other for other in part if not other.startswith(name)] for part in (lines[:at], lines[end:])
        )
        found.append((field, "\n".join([*before, indent + field, *after])))
    return found


@pytest.mark.parametrize(
    ("field", "text"), [pair for snippet in snippets(WHOLE) for pair in uncommented(snippet.text)]
)
def test_a_commented_field_can_be_used(field: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(Authority.create("example").root_pem)
    assert check(text, tmp_path) == "", field


def test_commented_fields_are_found() -> None:
    fields = {
        field.partition(":")[0] for snippet in snippets(WHOLE) for field, _ in uncommented(snippet.text)
    }
    assert {"connect", "ca", "token", "limits", "tokens", "min_tls", "keepalive"} <= fields
