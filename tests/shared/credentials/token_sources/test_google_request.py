"""google-auth's requests in a thread: what comes back, what is refused, and how it ends when nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from operator import methodcaller
from typing import TypeVar

import pytest
from google.auth import exceptions

from shared.credentials.token_sources.google_request import (
    MOST_STEPS,
    Request,
    check_url,
    in_thread,
)
from shared.errors import TokenError
from tests.support.google import Google
from tests.support.metadata_server import PATIENCE_S, Answer, listening

T = TypeVar("T")


async def run(work: Callable[[Request], T], *, step_timeout_s: float = 5, tls: ssl.SSLContext) -> T:
    return await in_thread("the test's", work, step_timeout_s=step_timeout_s, tls=tls)


async def test_a_request_and_its_answer(google: Google) -> None:
    google.faults["oauth"] = Answer(b"body", 418, (("x-name", "value"),))

    def work(request: Request) -> tuple[int, bytes, str, str]:
        url = f"{google.url}/token?a=b"
        answer = request(url, "POST", "text", {"x-ours": "1"}, timeout=120)
        return answer.status, answer.data, answer.headers["x-name"], threading.current_thread().name

    status, body, header, thread = await run(work, tls=google.tls)
    assert (status, body, header) == (418, b"body", "value")
    assert thread.startswith("google-auth")
    (asked,) = google.requests
    assert (asked.body, asked.headers["x-ours"], asked.query) == (b"text", "1", {"a": ["b"]})


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_what_google_auth_would_try_again_is_an_error_at_once(google: Google, status: int) -> None:
    google.faults["oauth"] = Answer(b'{"error": "server_error"}', status)
    with pytest.raises(TokenError, match=rf"answered {status} \(server_error\)") as caught:
        await run(lambda request: request(f"{google.url}/token"), tls=google.tls)
    assert caught.value.reason == "refused"
    assert len(google.requests) == 1


async def test_nothing_of_an_answer_is_logged(google: Google, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    google.faults["oauth"] = Answer(raw=b"HTTP/1.1 200 OK\r\nx: SECRET\r\nno colon SECRET\r\n\r\n{}")
    await run(lambda request: request(f"{google.url}/token?SECRET").status, tls=google.tls)
    assert "SECRET" not in caplog.text


async def test_a_redirection_is_not_followed(google: Google) -> None:
    google.faults["oauth"] = Answer(b"", 307, (("location", f"{google.url}/subject"),))
    status = await run(lambda request: request(f"{google.url}/token", "POST", b"x").status, tls=google.tls)
    assert (status, len(google.requests)) == (307, 1)


async def test_an_answer_that_drips_has_an_end() -> None:
    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

    tls = ssl.create_default_context()
    async with listening(drip) as port:
        late = rf"no complete answer from 127\.0\.0\.1:{port} within 0.2 s"
        with pytest.raises(TokenError, match=late) as caught:
            await run(lambda request: request(f"http://127.0.0.1:{port}/"), step_timeout_s=0.2, tls=tls)
    assert caught.value.reason == "unreachable"


async def test_client_certificates_are_refused(google: Google) -> None:
    with pytest.raises(TokenError, match="over mTLS"):
        await run(lambda request: request(f"{google.url}/token", cert=("a", "b")), tls=google.tls)


async def test_a_url_that_is_none(google: Google) -> None:
    for url in ("ftp://host/", "https://host name/", "", "https://user:SECRET@host/", "https://user:SECRET/"):
        with pytest.raises(TokenError) as caught:
            await run(methodcaller("__call__", url), tls=google.tls)
        assert "SECRET" not in str(caught.value)


async def test_all_steps_together_have_an_end(google: Google) -> None:
    let_go = threading.Event()

    def work(request: Request) -> None:
        let_go.wait(PATIENCE_S)

    try:
        with pytest.raises(TokenError, match=rf"no token with the test's within {MOST_STEPS * 0.02:g} s"):
            await run(work, step_timeout_s=0.02, tls=google.tls)
    finally:
        let_go.set()


async def test_who_has_given_up_asks_nobody_any_more(google: Google) -> None:
    go_on, outcomes = threading.Event(), asyncio.Queue[BaseException]()
    loop = asyncio.get_running_loop()

    def work(request: Request) -> None:
        go_on.wait(PATIENCE_S)
        try:
            request(f"{google.url}/token")
        except exceptions.TransportError as error:
            loop.call_soon_threadsafe(outcomes.put_nowait, error)

    with pytest.raises(TokenError):
        await run(work, step_timeout_s=0.02, tls=google.tls)
    go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        assert str(await outcomes.get()) == "given up"
    assert google.requests == []


def test_a_thread_outlives_its_loop() -> None:
    go_on, outcomes = threading.Event(), []
    done = threading.Event()

    def work(request: Request) -> None:
        go_on.wait(PATIENCE_S)
        try:
            request("https://127.0.0.1:1/")
        except exceptions.TransportError as error:
            outcomes.append(str(error))
        done.set()

    async def leave() -> None:
        with pytest.raises(TokenError):
            await run(work, step_timeout_s=0.01, tls=ssl.create_default_context())

    asyncio.run(leave())
    go_on.set()
    assert done.wait(PATIENCE_S)
    assert outcomes == ["given up"]


def test_nobody_waits_for_a_thread_at_the_end() -> None:
    """As with a federation's program that hangs: the process ends when it is done."""
    program = (
        "import asyncio, threading; from shared.credentials.token_sources.google_request import in_thread; "
        "hang = lambda request: threading.Event().wait(60); "
        "asyncio.run(in_thread('it', hang, step_timeout_s=0.01, tls=None))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.stderr.endswith("TokenError: no token with it within 0.03 s\n")


@pytest.mark.parametrize(
    "url",
    [
        "https://anywhere.example/",
        "http://127.0.0.1:8080/",
        "http://[::1]/",
        "http://localhost/",
        "http://169.254.169.254/latest",
        "http://[fd00:ec2::254]/latest",
        "http://metadata.google.internal/",
    ],
)
def test_where_secrets_may_go(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    ["http://169.254.evil.example/", "http://10.0.0.1/", "http://localhost.example/", "http://8.8.8.8/"],
)
def test_where_secrets_may_not_go(url: str) -> None:
    with pytest.raises(ValueError, match="over https"):
        check_url(url)
