"""What a module has to keep to that setup.py lists as compiled: mypyc says nothing of most of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import version
from tests.support.checkout import ROOT


def listed(name: str) -> list[str]:
    """The list of this name in setup.py, which cannot be imported."""
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            value: list[str] = ast.literal_eval(statement.value)
            return value
    raise LookupError(name)


def sources(patterns: list[str]) -> set[Path]:
    return {path for pattern in patterns for path in ROOT.glob(pattern) if path.name != "__init__.py"}


COMPILED = sources(listed("COMPILED")) - sources(listed("NOT_COMPILED"))

MODULES = sorted(
    path for room in ("agent", "gateway", "hbone", "shared", "tests") for path in (ROOT / room).rglob("*.py")
)


HARMLESS = {"len", "max", "min", "rfind"}
"""Functions that may be called twice."""


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def imported_names(path: Path) -> dict[str, str]:
    """Names in the module, and the modules that they come from."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("pattern", [*listed("COMPILED"), *listed("NOT_COMPILED")])
def test_each_pattern_finds_something(pattern: str) -> None:
    assert sources([pattern])


def test_nothing_else_derives_from_a_compiled_class() -> None:
    """The class could be made, and its objects could not. Protocols are free: they have no objects."""
    compiled = {module_name(path) for path in COMPILED}
    protocols = {
        (module_name(path), each.name)
        for path in COMPILED
        for each in classes(path)
        if any(ast.unparse(base).startswith(("Protocol", "TypedDict")) for base in each.bases)
    }
    wrong = []
    for path in MODULES:
        if path in COMPILED:
            continue
        names = imported_names(path)
        for each in classes(path):
            for base in each.bases:
                name = ast.unparse(base).partition("[")[0]
                origin = names.get(name, "")
                if origin in compiled and (origin, name) not in protocols:
                    wrong.append(f"{path.relative_to(ROOT)}: {each.name}({name})")
    # Left out where the tests run compiled.
    assert wrong == [f"tests/shared/tunnel/test_opening.py: {name}(Upstream)" for name in ("Closed", "Held")]


@pytest.mark.parametrize("path", sorted(COMPILED), ids=module_name)
def test_no_dataclass_with_slots(path: Path) -> None:
    """The class that dataclass() makes then is another than the compiled one, and importing it crashes."""
    for each in classes(path):
        for decorator in each.decorator_list:
            assert "slots=True" not in ast.unparse(decorator), each.name


@pytest.mark.parametrize("path", sorted(COMPILED), ids=module_name)
def test_no_enum_with_attributes(path: Path) -> None:
    """Its members cannot be made."""
    for each in classes(path):
        if any(ast.unparse(base).rpartition(".")[2] == "Enum" for base in each.bases):
            methods = [node.name for node in each.body if isinstance(node, ast.FunctionDef)]
            assert "__init__" not in methods, each.name


@pytest.mark.parametrize("path", sorted(COMPILED), ids=module_name)
def test_nothing_is_awaited_with_an_exception_at_hand(path: Path) -> None:
    """A compiled coroutine that is suspended in `except` or `finally` leaves its exception to the thread. It
    becomes the context of whatever is raised next, anywhere, in a chain that grows for ever. So with
    `async with`, save for asyncio.timeout, whose end never waits."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                assert ast.unparse(item.context_expr).startswith("asyncio.timeout"), node.lineno
        if isinstance(node, ast.Try):
            for statement in (*node.finalbody, *(each for handler in node.handlers for each in handler.body)):
                for inner in ast.walk(statement):
                    assert not isinstance(inner, ast.Await | ast.AsyncFor | ast.AsyncWith), inner.lineno


@pytest.mark.parametrize("path", sorted(COMPILED), ids=module_name)
def test_no_bound_of_a_slice_does_anything(path: Path) -> None:
    """mypyc evaluates it twice where the sequence is none of its own kinds, such as a memoryview: a write in
    it sends the same bytes twice."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Slice):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call):
                    assert ast.unparse(inner.func).rpartition(".")[2] in HARMLESS, inner.lineno
                assert not isinstance(inner, ast.Await | ast.NamedExpr), node.lower


def test_all_of_it_is_compiled_or_none() -> None:
    """In the copy of make test-compiled every module has been replaced."""
    has_library = {bool(list(path.parent.glob(f"{path.stem}.*.so"))) for path in COMPILED}
    assert has_library == {version.is_compiled()}
