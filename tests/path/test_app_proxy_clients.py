"""Ordinary HTTP/2 clients on krun's own port: what is no tunnel is the app's; curl as a tunnel's client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.path.app import App
from tests.path.programs import MUCH_BYTES, random_file, run, sha256
from tests.support.world import World, find_program, running

GREETING = b"hello from the app, you asked for /some/path?and=query\n"
PATH = "/some/path?and=query"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[World]:
    """Behind krun's own port the demo's app; `app`, an echo, is a target beside it."""
    command = (sys.executable, "-m", "hbone.demo.app")
    told = {"PORT_ECHO": str(app.address)}
    with running(tmp_path_factory.mktemp("app-proxy"), inbound="none", app=command, environ=told) as world:
        yield world


@pytest.fixture(scope="module")
def url(world: World) -> str:
    return f"http://{world.container}{PATH}"


@pytest.mark.parametrize("times", [1, 5])
def test_nghttp_gets_so_many_times_on_one_connection(url: str, times: int) -> None:
    done = run(find_program("nghttp"), f"--multiply={times}", url)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", GREETING * times)


@pytest.mark.parametrize("more", [(), ("--trailer=x-checksum: 1",)], ids=["plain", "with trailers"])
def test_nghttp_posts(url: str, more: tuple[str, ...], tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", 1 << 20)
    done = run(find_program("nghttp"), f"--data={body}", *more, url)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == body.read_bytes()


def test_curl_gets(url: str) -> None:
    done = run(find_program("curl"), "--silent", "--show-error", "--fail", "--http2-prior-knowledge", url)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", GREETING)


def test_curl_asks_for_headers_only(url: str) -> None:
    done = run(find_program("curl"), "--silent", "--show-error", "--head", "--http2-prior-knowledge", url)
    assert done.returncode == 0
    # Python's server knows no HEAD: what counts is that its answer arrives, and no body is waited for.
    assert done.stdout.startswith(b"HTTP/2 501")


def test_curl_posts_64_mib(url: str, tmp_path: Path) -> None:
    body, answer = random_file(tmp_path / "body", MUCH_BYTES), tmp_path / "answer"
    curl = (find_program("curl"), "--silent", "--show-error", "--fail", "--http2-prior-knowledge")
    done = run(*curl, "--data-binary", f"@{body}", "--output", answer, url)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sha256(answer) == sha256(body)


def test_curl_through_a_tunnel(world: World, app: App, tmp_path: Path) -> None:
    """A POST as any other to it; the answer begins before its request has ended."""
    body, answer = random_file(tmp_path / "body", MUCH_BYTES), tmp_path / "answer"
    curl = (find_program("curl"), "--silent", "--show-error", "--fail", "--http2-prior-knowledge")
    url = f"http://{world.container}/_hbone/echo"
    done = run(*curl, "--request", "POST", "--upload-file", body, "--output", answer, url)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sha256(answer) == sha256(body)
    assert app.connections == 1


def test_an_unknown_target_is_said_to_be_one(world: World) -> None:
    url = f"http://{world.container}/_hbone/nowhere"
    done = run(find_program("curl"), "--silent", "--http2-prior-knowledge", url)
    assert done.stdout == b"no such target; known are 15003, 15008, 22, ECHO\n"
