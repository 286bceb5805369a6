"""The search of a test run for secrets: a run with a leak fails and says where, one without passes."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.support.secrets_search import finds

pytest_plugins = ["pytester"]

TOKEN = ".".join(
    base64.urlsafe_b64encode(part).rstrip(b"=").decode()
    for part in (json.dumps({"alg": "RS256", "typ": "JWT"}).encode(), b'{"aud":"a","exp":1}', b"signature")
)
KEY = "-----BEGIN EC PRIVATE KEY-----"

LEAKS = {
    "printed": f"def test_it(): print('got {TOKEN}')",
    "logged": f"import logging\ndef test_it(): logging.getLogger().warning('got %s', '{TOKEN}')",
    "raised": f"def test_it(): raise ValueError('{KEY}')",
    "a log file": f"def test_it(tmp_path): (tmp_path / 'hgate.log').write_text('{TOKEN}')",
    "a port": "from tests.support.secrets_search import said\n"
    f"def test_it(): said('admin/config', b'{TOKEN}')",
    "a child": "import subprocess, sys\n"
    "def test_it(): subprocess.run([sys.executable, 'child.py'], capture_output=True)",
    "a child of asyncio": "import asyncio, sys\n"
    "def test_it():\n"
    "    async def run():\n"
    "        pipe = asyncio.subprocess.PIPE\n"
    "        child = await asyncio.create_subprocess_exec(sys.executable, 'child.py', stdout=pipe)\n"
    "        await child.communicate()\n"
    "    asyncio.run(run())",
    "a google token": "def test_it(): print('ya29.a0AfH6SMBx')",
}


@pytest.fixture(autouse=True)
def _finds_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))


def run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    pytester.makepyfile(test_leak=test)
    child = f"print('{TOKEN[:40]}', end='', flush=True); print('{TOKEN[40:]}')"
    (pytester.path / "child.py").write_text(child)
    (pytester.path / "conftest.py").write_text('pytest_plugins = ["tests.support.secrets_search"]')
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", "addopts=")


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_leak_fails_the_run_and_is_not_repeated(pytester: pytest.Pytester, leak: str) -> None:
    result = run(pytester, leak)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*a secret was let out*"])
    shown = "\n".join(result.outlines)
    assert TOKEN not in shown and "ya29.a0" not in shown


def test_a_command_line_fails_the_run(pytester: pytest.Pytester) -> None:
    # It ends when it has been seen: the file is the watch's.
    result = run(
        pytester,
        f"""
        import pathlib, subprocess, sys
        def test_it(tmp_path):
            script = "import sys; sys.stdin.read()"
            child = subprocess.Popen([sys.executable, "-c", script, "{TOKEN}"], stdin=subprocess.PIPE)
            watched = tmp_path.parent
            while not any(b"sys.stdin.read" in file.read_bytes() for file in watched.glob("titles*/seen")):
                pass
            child.communicate()
        """,
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*secrets: * 1 with a secret*", "*a command line: a token after*"])


def test_a_run_without_leaks_passes(pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(tmp_path): print('eyJ'); (tmp_path / 'a.log').write_text('nothing')")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*secrets: * 0 with a secret*"])


def test_who_shows_one_on_purpose_says_so(pytester: pytest.Pytester) -> None:
    marked = f"import pytest\n@pytest.mark.shows_secret\ndef test_it(): print('{TOKEN}')"
    assert run(pytester, marked).ret == pytest.ExitCode.OK


def test_each_secret_is_one_line_without_it() -> None:
    told = list(finds("a log", f"Bearer {TOKEN}, then {KEY}".encode()))
    assert [line.partition(" after ")[0] for line in told] == ["a log: a token", "a log: a private key"]
