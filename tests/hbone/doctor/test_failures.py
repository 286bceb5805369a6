"""Each failure that the doctor names is made, and found by name at its hop."""

from __future__ import annotations

import re
from email.utils import formatdate
from time import time

import pytest

from agent.config.settings import Settings
from shared.doctor.failures import Failure
from shared.doctor.report import as_text
from shared.doctor.walk import Verdict
from shared.tasks import spawn
from tests.hbone.cloudrun.world import URL
from tests.hbone.doctor.failures_made import MADE
from tests.hbone.doctor.looking import Bench, behind, s_server, says, tcp
from tests.support.connect_proxy import ConnectProxy
from tests.support.http2_peer import PeerStream, Service
from tests.support.krun_port import KrunPort


@pytest.mark.parametrize("failure", MADE, ids=lambda failure: failure.name)
async def test_a_failure_is_found_by_name(bench: Bench, failure: Failure) -> None:
    report = await MADE[failure](bench)
    failed = report.failed
    assert failed is not None, as_text(report, colour=False)
    assert failed.failure is failure, as_text(report, colour=False)
    assert report.exit_code == failure.hop.exit_code
    assert failed.detail
    behind = report.results[report.results.index(failed) + 1 :]
    if failed.title:  # lines about this machine, each by itself
        return
    assert {result.verdict for result in behind} <= {Verdict.SKIP}
    assert {result.detail for result in behind} <= {"not reached"}


async def test_a_server_that_refuses_our_protocol_by_an_alert(bench: Bench) -> None:
    async with s_server(bench.credentials, "-alpn", "http/1.1") as port:
        report = await bench.at_front_end(port)
    assert report.failed is not None
    assert report.failed.failure is Failure.NO_HTTP2


async def test_an_app_that_shows_the_token_is_not_repeated(bench: Bench) -> None:
    """It answers with the request's own headers."""

    def show(stream: PeerStream) -> None:
        async def answer() -> None:
            stream.respond(418, [(b"content-type", b"text/plain")])
            await stream.send(b"you sent " + stream[b"authorization"])
            stream.end()

        spawn(answer(), name="answer")

    async with behind(show) as port:
        flags = ("--audience", URL, "--token-file", bench.token())
        report = await bench.look(f"http://127.0.0.1:{port}/_hbone/22", *flags)
    assert report.failed is not None
    assert report.failed.detail == "answered 418: you sent Bearer [secret]"


async def test_through_a_proxy(bench: Bench) -> None:
    """The proxy looks the name up, and connects; the rest is as without."""
    async with (
        KrunPort.serving(Settings()) as krun,
        bench.credentials.front_end(krun.port) as port,
        ConnectProxy.listening(port) as proxy,
    ):
        flags = ("--ca", bench.credentials.folder / "ca.pem", "--token-file", bench.token())
        report = await bench.look(URL, *flags, environ={"HTTPS_PROXY": proxy.url})
    assert report.failed is None, as_text(report, colour=False)
    details = {result.name: result.detail for result in report.results}
    assert details["dns"] == "the proxy looks it up"
    assert re.fullmatch(r"proxy 127\.0\.0\.1:\d+ answered 200", details["proxy"])
    assert details["tcp"] == "the proxy has connected"


async def test_a_server_of_http1_without_tls(bench: Bench) -> None:
    async with tcp(lambda peer: peer.send_soon(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
        report = await bench.look(f"http://127.0.0.1:{port}/_hbone/22")
    assert report.failed is not None
    assert report.failed.failure is Failure.NO_HTTP2


async def test_a_kept_token_that_is_refused_is_renewed(bench: Bench) -> None:
    """The file has another one by then, as a cache would."""
    file = bench.token()
    old = file.read_text()
    about = b'{"krun": "9", "targets": ["22"]}'
    json = (b"content-type", b"application/json")
    async with Service.listening() as service:

        async def serve() -> None:
            first = await service.request()
            assert first[b"authorization"] == f"Bearer {old}".encode()
            file.write_text(bench.credentials.token(lifetime_s=1800))
            first.respond(401, end=True)
            for _ in range(2):
                stream = await service.request()
                assert stream[b"authorization"] != f"Bearer {old}".encode()
                stream.respond(200, [json])
                await stream.send(about)
                stream.end()

        serving = spawn(serve(), name="serve")
        flags = ("--audience", URL, "--token-file", file)
        report = await bench.look(f"http://127.0.0.1:{service.port}", *flags)
        await serving
    assert report.failed is None, as_text(report, colour=False)


async def test_an_old_krun_is_known_by_its_answer(bench: Bench) -> None:
    old = (404, [(b"content-type", b"text/plain")], b"no such target; known are 15003, 22\n")
    async with says(old, old) as port:
        report = await bench.look(f"http://127.0.0.1:{port}")
    assert report.failed is None, as_text(report, colour=False)
    details = {result.name: result.detail for result in report.results}
    assert details["krun"] == "krun, a version that does not tell which"
    assert details["dial"] == "the URL names no target, such as /_hbone/22"


@pytest.mark.parametrize("url", ["https://hello.a.run.app", "https://hello.a.run.app/"])
async def test_a_url_without_a_path_looks_no_further_than_krun(bench: Bench, url: str) -> None:
    async with KrunPort.serving(Settings()) as krun, bench.credentials.front_end(krun.port) as port:
        flags = ("--connect", f"127.0.0.1:{port}", "--ca", bench.credentials.folder / "ca.pem")
        report = await bench.look(url, *flags, "--token-file", bench.token())
    assert report.failed is None, as_text(report, colour=False)
    assert [result.verdict for result in report.results[-3:]] == ["PASS", "SKIP", "SKIP"]


async def test_a_clock_that_is_wrong_is_told_even_if_nothing_fails(bench: Bench) -> None:
    date = (b"date", formatdate(time() - 600, usegmt=True).encode())
    about = (200, [(b"content-type", b"application/json"), date], b'{"krun": "9", "targets": ["22"]}')
    async with says(about, about) as port:
        flags = ("--audience", URL, "--token-file", bench.token())
        report = await bench.look(f"http://127.0.0.1:{port}", *flags)
    token = next(result for result in report.results if result.name == "token")
    assert re.search(r"; this machine's clock is 60\d s ahead$", token.detail)
