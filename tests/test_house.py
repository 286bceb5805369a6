"""The house rules that a machine can hold: documents and code agree, names are unique."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from agent.config.settings import groups
from docs import write_reference
from shared import errors, ports
from shared.ops.access_log import _KEYS

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "agent", "shared", "hbone", "bench")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
OPERATE = (ROOT / "docs" / "operate.md").read_text()


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_init_files_are_empty() -> None:
    assert [path for path in sources() if path.name == "__init__.py" and path.read_text().strip()] == []


def test_architecture_lists_every_port() -> None:
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", ARCHITECTURE, re.MULTILINE)}
    assert listed == {value for name, value in vars(ports).items() if name.isupper()}


@pytest.mark.parametrize("name", write_reference.PAGES)
def test_the_reference_is_what_the_code_says(name: str) -> None:
    assert (write_reference.FOLDER / name).read_text() == write_reference.PAGES[name](), "run: make reference"


def test_rows_of_the_documents_are_in_tables() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"):
        lines = path.read_text().splitlines()
        loose = [
            after
            for before, line, after in zip(lines, lines[1:], lines[2:], strict=False)
            if line.startswith("| ") and not before.startswith("|") and not after.startswith("|---")
        ]
        assert loose == [], f"{path}: a table without a head before {loose[0]}"


def test_a_variable_of_krun_has_one_meaning() -> None:
    names = [one.variable for settings in groups().values() for one in settings]
    assert sorted(set(names)) == sorted(names)


def test_the_documents_list_every_access_log_key() -> None:
    listed = set(re.findall(r"`([a-z_.]+)`", OPERATE.partition("## Logs")[2].partition("\n## ")[0]))
    assert {key for _, key in _KEYS} <= listed


def test_every_exit_code_has_a_meaning() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_") and type(value) is int}
    assert codes == set(errors.EXIT_CODES)


def test_the_tree_of_errors_is_in_one_module() -> None:
    """Others may raise exceptions that they catch themselves, of no class that users meet."""
    inside = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    elsewhere = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name, base in re.findall(r"^class (\w+)\((\w+)\b", path.read_text(), re.MULTILINE)
        if base in inside and path != ROOT / "shared" / "errors.py"
    }
    assert elsewhere == {"gateway/config/yaml_nodes.py: _FollowsError"}


OTHER_DIALS = {
    "shared/net/names/dns_query.py",  # c-ares' own
    "shared/net/dial.py",  # gives the event loop addresses, and sockets
    "gateway/workers/parent.py",  # where to listen, before there is an event loop
    "hbone/demo/client.py",  # of the demo's own gateway, on loopback
}


def test_every_dial_goes_by_one_resolver() -> None:
    """Names that the event loop looks up share four threads, which a silent name server keeps busy."""
    own = re.compile(
        r"getaddrinfo|gethostby|sock_connect\(|open_connection\((?!sock=)|socket\.create_connection"
    )
    loops = re.compile(r"\bloop\(?\)?\.create_connection\(([^()]|\([^()]*\))*\)")
    found = set()
    for path in sources():
        name = str(path.relative_to(ROOT))
        text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        by_name = [match[0] for match in loops.finditer(text) if "sock=" not in match[0]]
        if (own.search(text) or by_name) and not name.startswith("bench/"):
            found.add(name)
    assert found <= OTHER_DIALS


def test_the_tests_that_the_security_document_names_exist() -> None:
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs" / "security.md").read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("program", ["gateway", "agent", "hbone", "shared"])
def test_no_two_modules_of_a_program_have_one_name(program: str) -> None:
    names = Counter(path.name for path in (ROOT / program).rglob("*.py") if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1 and name != "cli.py"] == []
