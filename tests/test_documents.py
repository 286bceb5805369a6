"""The documents are true: snippets work, links lead somewhere, quoted messages are the programs' own."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from shared.credentials.certificates.authority import Authority
from tests.support.network import free_port

ROOT = Path(__file__).parent.parent

WHOLE = "# hgate.yaml, a whole file"
PART = "# a part of hgate.yaml"
OTHER = "# for kubectl apply"
"""How a snippet begins."""

DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
)

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
    """Those of all documents that begin so."""
    found = [
        Snippet(str(path.relative_to(ROOT)), text)
        for path in DOCUMENTS
        for text in _BLOCK.findall(path.read_text())
    ]
    return [snippet for snippet in found if not beginnings or snippet.begins.startswith(beginnings)]


def check(text: str, folder: Path) -> str:
    """What is wrong with it as the gateway's file, by `hgate --check`; empty: nothing."""
    (folder / "hgate.yaml").write_text(text)
    for name in re.findall(r"\bca: \"(\S+)\"", text):  # what is trusted has to be there
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(Authority.create("example").root_pem)
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
def test_a_part_fits_into_a_whole_file(snippet: Snippet, tmp_path: Path) -> None:
    whole = yaml.safe_load(next(one.text for one in snippets(WHOLE) if one.document == "docs/gateway.md"))
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
    assert check(text, tmp_path) == "", field


def test_commented_fields_are_found() -> None:
    fields = {
        field.partition(":")[0] for snippet in snippets(WHOLE) for field, _ in uncommented(snippet.text)
    }
    assert {"connect", "ca", "token", "limits", "tokens", "min_tls", "keepalive"} <= fields


_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names of a document's headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", path.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    dead = []
    for link in _LINK.findall(_FENCED.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        if name.startswith(("http:", "https:")):
            continue
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def texts() -> list[str]:
    """The texts in the programs; an f-string's values are \0."""

    def text(node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str() as value):
                return value
            case ast.JoinedStr(values=values):
                return "".join(map(text, values))
            case ast.BinOp(left=left, right=right):
                return text(left) + text(right)
        return "\0"

    return [
        text(node)
        for program in ("agent", "gateway", "hbone", "shared")
        for path in (ROOT / program).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    ]


_ELSEWHERE = (
    "No such file or directory",
    "unrecognized arguments",
    "peer did not return a certificate",
    "unable to get local issuer certificate",
    "LDS resource",
    "does not exist",
)
"""What the system, argparse, OpenSSL and gRPC say."""


def test_quoted_messages_are_the_programs_own() -> None:
    """Of each message in the first column of a table, the parts between what is left out."""
    known = "\n".join((*texts(), *_ELSEWHERE))
    page = (ROOT / "docs" / "troubleshoot.md").read_text().partition("## hgate does not start")[2]
    quoted = [
        quote
        for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
        for quote in re.findall(r"`([^`]+)`", row)
    ]
    parts = [
        part.strip(" ,;")
        for quote in quoted
        for part in re.split(r"\.\.\.|\b(?:HOST|FILE|NAME|FIELD|LINE|CODE|N|\d+)\b|[:=()]", quote)
    ]
    parts = [part for part in parts if len(part) > 7 and " " in part]
    assert len(parts) > 80
    assert [part for part in parts if part not in known] == []


def test_variables_in_the_documents_are_known() -> None:
    known = set(re.findall(r"HBONE_[A-Z_0-9]+", "\n".join(texts())))
    told = {
        (str(path.relative_to(ROOT)), name)
        for path in DOCUMENTS
        for name in re.findall(r"HBONE_[A-Z_0-9]*[A-Z0-9](?![_*])", path.read_text())
    }
    assert sorted((document, name) for document, name in told if name not in known) == []


_COMMAND = re.compile(r"^(?:[A-Z_0-9]+=\\S+ +)*(?:hgate|hbone|krun) .*?(?<!\\\\)$", re.MULTILINE | re.DOTALL)


def test_flags_in_the_shell_snippets_are_known() -> None:
    known = set(texts())
    used = {
        (str(path.relative_to(ROOT)), flag)
        for path in DOCUMENTS
        for block in re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
        for command in _COMMAND.findall(block)
        for flag in re.findall(r" (--[a-z-]+[a-z])", command.partition("#")[0].partition(" krun ")[0])
    }
    assert {"--config", "--sni", "--token-file"} <= {flag for _, flag in used}
    assert sorted(pair for pair in used if pair[1] not in known) == []


def test_modules_in_the_walks_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:shared|gateway|agent|hbone)/[a-z0-9_/]+)(?:\.py)?`", text)
    assert len(named) > 30
    assert [
        name for name in named if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").is_file()
    ] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text())
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))


_PORTS = (8080, 8443, 8444, 15000, 15009, 15020, 15021, 15443)
"""Those of the page's programs; each run of the test has others."""


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
def test_the_page_of_the_first_tunnel_works(tmp_path: Path) -> None:
    """All that it has to be typed, in order, but for the installation."""
    page = (ROOT / "docs" / "first-tunnel.md").read_text()
    blocks = re.findall(r"^```(sh|yaml)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    script = "sleep 0.3\n".join(
        f"cat > hgate.yaml <<END\n{text}END\n" if kind == "yaml" else text
        for kind, text in blocks
        if "git clone" not in text
    )
    moved = {str(port): str(free_port()) for port in _PORTS}
    script = re.sub(rf"\b(?:{'|'.join(moved)})\b", lambda match: moved[match[0]], script)
    script = script.replace(
        "hbone cloudrun",
        f"hbone cloudrun --listen 127.0.0.1:{moved['8443']} --metadata 127.0.0.1:{moved['8444']}",
    )
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HBONE_APP": f"127.0.0.1:{moved['8080']}",
        "HBONE_INBOUND_LISTEN": f"127.0.0.1:{free_port()}",
    }
    ran = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "spiffe://demo.local/ns/demo/sa/client" in ran.stdout
    assert "hello from the app\n" in ran.stdout
    assert len(re.findall("connection complete", ran.stdout)) >= 2  # hgate's, krun's tunnel
    assert "request complete" in ran.stdout  # krun's mTLS end's
    assert '"flags":"NO_ROUTE"' in ran.stdout
    assert "https://hello.a.run.app" in ran.stdout
