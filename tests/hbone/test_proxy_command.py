"""`hbone URL` as ssh starts it: a process with two pipes, against a service that the test plays."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import ssl
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived
from h2.settings import SettingCodes, Settings

from shared.credentials.certificates.authority import Authority
from shared.errors import (
    EXIT_DENIED,
    EXIT_OK,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from shared.http2 import frames
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from tests.hbone.commands import COMMAND, Command, Ended, output_of, running
from tests.hbone.descriptors import Descriptors, read
from tests.support.google import Google
from tests.support.google_services import JWT_TYPE, POOL, WORKLOAD
from tests.support.http2_peer import PeerStream, Service
from tests.support.metadata_server import Answer, MetadataServer, closed_port, unsigned_token
from tests.support.tcp_peer import PATIENCE_S, TcpServer

HOST = "hello.a.run.app"
MIB = 1 << 20
FAR_FUTURE = 4102444800  # 2100-01-01
ACCOUNT = "other@proj.iam.gserviceaccount.com"


@asynccontextmanager
async def asked(
    *flags: object,
    first: bytes = b"",
    shell: str = 'exec "$@"',
    stdout: int = PIPE,
    python: tuple[str, ...] = COMMAND,
) -> AsyncIterator[tuple[Command, PeerStream, Service]]:
    """A command that has `first` on its standard input, and whose request has come."""
    async with (
        Service.listening() as service,
        running(
            *(f"http://127.0.0.1:{service.port}/_hbone/22", *flags), python=python, shell=shell, stdout=stdout
        ) as command,
    ):
        await command.send(first)
        yield command, await service.request(), service


@asynccontextmanager
async def tunnel(
    *flags: object, shell: str = 'exec "$@"', stdout: int = PIPE
) -> AsyncIterator[tuple[Command, PeerStream, Service]]:
    """A command whose request has been answered with 200."""
    async with asked(*flags, shell=shell, stdout=stdout) as (command, stream, service):
        stream.respond(200)
        yield command, stream, service


def assert_refusal(ended: Ended, code: int, text: str) -> None:
    """One line on standard error that says why, nothing on standard output."""
    assert ended.code == code, ended
    assert ended.stdout == b""
    assert re.fullmatch(r"hbone: [^\n]+\n", ended.stderr), ended.stderr
    assert re.search(text, ended.stderr), ended.stderr


# Carrying.


async def test_bytes_both_ways_the_input_ends_first() -> None:
    async with asked(first=b"SSH-2.0-here\r\n") as (command, stream, service):
        assert stream.fields == [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", f"127.0.0.1:{service.port}".encode()),
            (b":path", b"/_hbone/22"),
        ], "no token goes out without TLS"
        assert await stream.read(14) == b"SSH-2.0-here\r\n", "it goes with the request"
        stream.respond(200)
        await stream.send(b"SSH-2.0-there\r\n")
        assert await command.read(15) == b"SSH-2.0-there\r\n"

        await command.send(b"exit\n")
        command.end()
        assert await stream.rest() == b"exit\n"
        await stream.send(b"still here")
        stream.end()
        assert await command.ended() == Ended(EXIT_OK, b"still here", "")
        assert service.connections[0].goaway, "it left in good order"


async def test_the_far_side_ends_first() -> None:
    async with tunnel() as (command, stream, _):
        await stream.send(b"bye")
        stream.end()
        assert await command.rest() == b"bye", "and the end of the output, while the input goes on"
        await command.send(b"one thing more")
        command.end()
        assert await stream.rest() == b"one thing more"
        assert await command.ended() == Ended(EXIT_OK, b"", "")


async def test_a_200_that_is_all() -> None:
    async with asked() as (command, stream, _):
        stream.respond(200, end=True)
        command.end()
        assert await stream.rest() == b""
        assert await command.ended() == Ended(EXIT_OK, b"", "")


async def test_much_at_once_both_ways() -> None:
    up, down = os.urandom(4 * MIB), os.urandom(4 * MIB)
    async with tunnel() as (command, stream, _), asyncio.TaskGroup() as group:
        group.create_task(command.send(up)).add_done_callback(lambda _: command.end())
        group.create_task(stream.send(down)).add_done_callback(lambda _: stream.end())
        received = group.create_task(stream.rest())
        ended = await command.ended()
        assert (ended.code, ended.stdout == down, ended.stderr) == (EXIT_OK, True, "")
        assert await received == up


async def test_a_reader_that_is_slow_gets_what_came_before_the_end() -> None:
    async with tunnel() as (command, stream, service):
        command.end()
        await stream.rest()
        down = os.urandom(900 << 10)  # more than pipe and reader hold: the rest waits in the command
        await stream.send(down)
        stream.end()
        peer = service.connections[0]
        await peer.until(lambda: peer.lost)
        assert peer.goaway
        assert await command.ended() == Ended(EXIT_OK, down, "")


async def test_a_far_side_that_is_slow_gets_what_was_sent_before_the_end() -> None:
    async with tunnel() as (command, stream, service):
        stream.end()
        stream.window_held = True
        up = os.urandom(300 << 10)
        sending = spawn(command.send(up), name="input")
        await stream.peer.until(lambda: len(stream.data) > 60_000)
        stream.release_window()
        await sending
        command.end()
        assert await stream.rest() == up
        assert await command.ended() == Ended(EXIT_OK, b"", "")
        assert service.connections[0].goaway


async def test_the_last_bytes_get_out_though_the_far_side_takes_its_time() -> None:
    """When both ends have been said, the kernel's buffers are full and the command still holds some."""
    up = os.urandom(8 * MIB)  # twice what a send buffer grows to
    received = hashlib.sha256()
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        h2 = H2Connection(H2Configuration(client_side=False))
        h2.local_settings = Settings(client=False, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        h2.initiate_connection()
        h2.increment_flow_control_window(1 << 30)
        while data := await reader.read(1 << 14):
            for event in h2.receive_data(data):
                if isinstance(event, RequestReceived):
                    h2.send_headers(1, [(":status", "200")], end_stream=True)
                elif isinstance(event, DataReceived):
                    received.update(event.data or b"")
            writer.write(h2.data_to_send())
            await asyncio.sleep(0.001)  # slower than the command, that is all
        writer.close()
        over.set()

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    async with (
        await asyncio.start_server(serve, sock=listener, limit=1 << 14),
        running(f"http://127.0.0.1:{listener.getsockname()[1]}/_hbone/22") as command,
    ):
        await command.send(up)
        command.end()
        assert await command.ended() == Ended(EXIT_OK, b"", "")
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        assert received.digest() == hashlib.sha256(up).digest()


# Tokens and TLS.


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """A service's, with a certificate for HOST; `ca.pem` is its authority, `other.pem` another one."""
    authority = Authority.create("cloudrun.local")
    pair = authority.issue(dns_names=(HOST,), client=False)
    for name, pem in (
        ("ca", authority.root_pem),
        ("cert", pair.certificate_pem),
        ("key", pair.key_pem),
        ("other", Authority.create("elsewhere.local").root_pem),
    ):
        (tmp_path / f"{name}.pem").write_bytes(pem)
    return server_context(tmp_path / "cert.pem", tmp_path / "key.pem")


@pytest.mark.parametrize(
    ("flags", "audience"),
    [((), f"https://{HOST}"), (("--audience", "https://other.example"), "https://other.example")],
    ids=["default", "--audience"],
)
async def test_a_token_from_the_metadata_server(
    tls: ssl.SSLContext, tmp_path: Path, flags: tuple[str, ...], audience: str
) -> None:
    token = unsigned_token(aud=audience, exp=FAR_FUTURE)
    async with (
        MetadataServer(lambda _: Answer(token.encode())) as metadata,
        Service.listening(tls) as service,
        running(
            *(f"{HOST}:22", "--ca", tmp_path / "ca.pem", "--connect", f"127.0.0.1:{service.port}", *flags),
            environ={"GCE_METADATA_HOST": metadata.host},
        ) as command,
    ):
        stream = await service.request()
        assert stream.fields == [
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":authority", HOST.encode()),
            (b":path", b"/_hbone/22"),
            (b"authorization", f"Bearer {token}".encode()),
        ]
        assert [request.audience for request in metadata.requests] == [audience]
        stream.respond(200)
        await stream.send(b"hello")
        stream.end()
        command.end()
        await stream.rest()
        assert await command.ended() == Ended(EXIT_OK, b"hello", "")


async def test_a_token_from_a_file_and_none_at_all(tls: ssl.SSLContext, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    async with Service.listening(tls) as service:
        to = (f"{HOST}:22", "--ca", tmp_path / "ca.pem", "--connect", f"127.0.0.1:{service.port}")
        async with running(*to, "--token-file", tmp_path / "token"):
            assert (await service.request())[b"authorization"] == b"Bearer secret-token"
        async with running(*to, "--no-token"):
            assert b"authorization" not in dict((await service.request()).fields)


async def test_a_file_s_token_for_another_service_goes_nowhere(tls: ssl.SSLContext, tmp_path: Path) -> None:
    token = unsigned_token(aud="https://other.a.run.app", exp=FAR_FUTURE)
    (tmp_path / "token").write_text(token)
    async with Service.listening(tls) as service:
        to = [f"{HOST}:22", "--ca", tmp_path / "ca.pem", "--connect", f"127.0.0.1:{service.port}"]
        ended = await output_of(*to, "--token-file", tmp_path / "token")
        assert_refusal(
            ended, EXIT_DENIED, rf"its token is for https://other\.a\.run\.app, not for https://{HOST}"
        )
        assert service.connections == []
        to += ["--token-file", tmp_path / "token", "--audience", "https://other.a.run.app"]
        async with running(*to):
            assert (await service.request())[b"authorization"] == f"Bearer {token}".encode()


async def test_a_program_that_gives_the_token_gets_nothing_of_the_input(
    tls: ssl.SSLContext, tmp_path: Path
) -> None:
    """google-auth runs it with the command's standard input."""
    async with Google() as google, Service.listening(tls) as service:
        google.grants.add((WORKLOAD, ACCOUNT))
        answer = {
            "version": 1,
            "success": True,
            "token_type": JWT_TYPE,
            "id_token": google.kubernetes_token(f"https:{POOL}"),
        }
        (tmp_path / "answer").write_text(json.dumps(answer))
        (tmp_path / "program").write_text(f"cat >{tmp_path}/taken; cat {tmp_path}/answer")
        source = {"executable": {"command": f"sh {tmp_path}/program", "timeout_millis": 5000}}
        google.url = google.plain_url  # google-auth trusts no authority of ours
        (tmp_path / "adc.json").write_text(json.dumps(google.federation_file(source, ACCOUNT)))
        async with running(
            *(f"{HOST}:22", "--ca", tmp_path / "ca.pem", "--connect", f"127.0.0.1:{service.port}"),
            environ={
                "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "adc.json"),
                "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES": "1",
            },
        ) as command:
            await command.send(b"SSH-2.0-here\r\n")
            stream = await service.request()
            token = stream[b"authorization"].decode().removeprefix("Bearer ")
            assert google.claims(token, f"https://{HOST}")["email"] == ACCOUNT
            stream.respond(200)
            assert await stream.read(14) == b"SSH-2.0-here\r\n"
        assert (tmp_path / "taken").read_bytes() == b""


# Refusals.

LATER = (b"retry-after", b"3600")
"""Longer than anybody waits."""


@pytest.mark.parametrize(
    ("status", "code", "body", "text"),
    [
        (401, EXIT_DENIED, b"", "answered 401: no token was sent: the peer's own policy asks for one"),
        (403, EXIT_DENIED, b"", "answered 403: no token was sent: the peer's own policy asks for one"),
        (404, EXIT_UNAVAILABLE, b"no such target; known are 15003, 22\n", "404: no such target; known are"),
        (404, EXIT_UNAVAILABLE, b"two\nlines\x1b[31m", r"answered 404: two lines\?\[31m"),
        (429, EXIT_UNAVAILABLE, b"", "answered 429: no instance of the service is free"),
        (500, EXIT_UNAVAILABLE, b"", "answered 500"),
        (503, EXIT_UNAVAILABLE, b"connect to 127.0.0.1:15022: connection refused", "503: connect to 127."),
        (204, EXIT_UNAVAILABLE, b"", "answered 204"),
    ],
)
async def test_a_status_that_is_not_200(status: int, code: int, body: bytes, text: str) -> None:
    kind = [(b"content-type", b"text/plain" if body else b"text/html"), LATER]
    async with asked(first=b"SSH-2.0-here\r\n") as (command, stream, service):
        stream.respond(status, kind)
        await stream.send(body or b"<html>long and useless</html>")
        stream.end()
        ended = await command.ended()
        assert_refusal(ended, code, text)
        assert f"http://127.0.0.1:{service.port}/_hbone/22: " in ended.stderr
        assert stream.data == b"SSH-2.0-here\r\n"


async def test_what_may_have_an_effect_is_sent_after_the_200() -> None:
    async with asked(first=b"INCR visits\r\n") as (command, stream, _):
        await stream.peer.answered()
        assert stream.data == b""
        stream.respond(200)
        assert await stream.read(13) == b"INCR visits\r\n"
        command.end()
        assert await stream.rest() == b""
        stream.end()
        assert await command.ended() == Ended(EXIT_OK, b"", "")


async def test_an_identification_arrives_once_however_often_it_is_sent() -> None:
    async with asked(first=b"SSH-2.0-here\r\nand more") as (command, first, service):
        assert await first.read(14) == b"SSH-2.0-here\r\n"
        first.respond(503, end=True)
        stream = await service.request()
        assert await stream.read(14) == b"SSH-2.0-here\r\n"
        stream.respond(200)
        assert await stream.read(8) == b"and more"
        command.end()
        assert await stream.rest() == b""
        stream.end()
        assert await command.ended() == Ended(EXIT_OK, b"", "")


async def test_a_token_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("opaque")
    async with asked("--token-file", tmp_path / "token") as (command, stream, _):
        assert stream[b"authorization"] == b"Bearer opaque"
        stream.respond(401, end=True)
        text = "answered 401: the token is invalid, expired or for another audience"
        assert_refusal(await command.ended(), EXIT_DENIED, text)


async def test_what_passes_is_waited_for() -> None:
    """And standard input waits as well."""
    async with asked(first=b"SSH-2.0-here\r\n") as (command, stream, service):
        stream.respond(429, end=True)
        (await service.request()).respond(503, [(b"retry-after", b"0")], end=True)
        (await service.request()).reset(frames.REFUSED_STREAM)
        (await service.request()).peer.say_goaway(last_stream_id=0)
        stream = await service.request()
        assert len(service.connections) == 5
        stream.respond(200)
        assert await stream.read(14) == b"SSH-2.0-here\r\n"
        stream.end()
        command.end()
        await stream.rest()
        assert await command.ended() == Ended(EXIT_OK, b"", "")


async def test_a_signal_ends_the_wait() -> None:
    async with asked() as (command, request, _):
        request.respond(503, [(b"retry-after", b"30")], end=True)
        await request.peer.until(lambda: request.peer.lost)
        command.signal(signal.SIGTERM)
        assert (await command.ended()).code == 128 + signal.SIGTERM


async def test_a_redirect_says_where_to() -> None:
    async with asked() as (command, stream, _):
        stream.respond(302, ((b"location", b"https://accounts.example/login"),), end=True)
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, "302 to https://accounts.example/login")


async def test_nobody_listens() -> None:
    ended = await output_of(f"http://127.0.0.1:{closed_port()}/_hbone/22")
    assert_refusal(ended, EXIT_UNAVAILABLE, "connection refused")


async def test_no_such_name() -> None:
    ended = await output_of("--no-token", "http://no-such-host.invalid/_hbone/22")
    assert_refusal(
        ended, EXIT_UNAVAILABLE, "connect to http://no-such-host.invalid at no-such-host.invalid:80"
    )


async def test_no_metadata_server() -> None:
    ended = await output_of(f"{HOST}:22", environ={"GCE_METADATA_HOST": f"127.0.0.1:{closed_port()}"})
    assert_refusal(ended, EXIT_DENIED, "no metadata server")
    assert "gcloud auth login" in ended.stderr
    assert "--token-file" in ended.stderr


async def test_no_token_file(tmp_path: Path) -> None:
    ended = await output_of(f"{HOST}:22", "--token-file", tmp_path / "none")
    assert_refusal(ended, EXIT_DENIED, f"cannot read token file {tmp_path}/none: No such file or directory")
    assert "gcloud" not in ended.stderr


async def test_a_certificate_that_is_not_trusted(tls: ssl.SSLContext, tmp_path: Path) -> None:
    async with Service.listening(tls) as service:
        at = ("--connect", f"127.0.0.1:{service.port}", "--no-token")
        ended = await output_of(f"{HOST}:22", "--ca", tmp_path / "other.pem", *at)
        assert_refusal(ended, EXIT_UNAVAILABLE, "certificate refused")
        ended = await output_of("www.other.example:22", "--ca", tmp_path / "ca.pem", *at)
        assert_refusal(ended, EXIT_UNAVAILABLE, "certificate is not valid for 'www.other.example'")
        ended = await output_of(f"{HOST}:22", "--ca", tmp_path / "none.pem", *at)
        assert_refusal(ended, EXIT_UNAVAILABLE, "none.pem: No such file or directory")


async def test_a_server_without_http2(tls: ssl.SSLContext, tmp_path: Path) -> None:
    tls.set_alpn_protocols(["http/1.1"])
    async with Service.listening(tls) as service:
        at = ("--connect", f"127.0.0.1:{service.port}", "--no-token", "--ca", tmp_path / "ca.pem")
        ended = await output_of(f"{HOST}:22", *at)
    assert_refusal(ended, EXIT_UNAVAILABLE, "does not offer HTTP/2")


async def test_a_server_of_http1() -> None:
    async with (
        TcpServer.listening() as server,
        running(f"http://127.0.0.1:{server.port}/_hbone/22") as command,
    ):
        peer = await server.accept()
        await peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        # It may come before our request is out, or after.
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, r"protocol error|does it take HTTP/2\?")


async def test_a_server_that_hangs_up_at_once() -> None:
    async with (
        TcpServer.listening() as server,
        running(f"http://127.0.0.1:{server.port}/_hbone/22") as command,
    ):
        (await server.accept()).reset()
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, r"connect(ion)? to [^ ]*127\.0\.0\.1")


async def test_a_response_that_never_comes() -> None:
    program = (
        "import os, sys; from hbone import cli, stdio_tunnel; stdio_tunnel.RESPONSE_TIMEOUT_S = 0.2; "
        "sys.exit(cli.run(sys.argv[1:], os.environ))"
    )
    async with asked(python=("-c", program)) as (command, _, _):
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, "no response headers within 0.2 s")


# The far side breaks off.


async def test_the_far_side_dies_in_mid_stream() -> None:
    async with tunnel() as (command, stream, service):
        await stream.send(b"half an ans")
        assert await command.read(11) == b"half an ans"
        service.connections[0].drop()
        ended = await command.ended()
        assert_refusal(
            ended,
            EXIT_UNAVAILABLE,
            rf"http://127\.0\.0\.1:{service.port}/_hbone/22: "
            r"ended after \S+ s: the connection broke.*reset by peer",
        )


async def test_the_far_side_resets_the_stream() -> None:
    async with tunnel() as (command, stream, service):
        stream.reset(frames.CONNECT_ERROR)
        assert_refusal(
            await command.ended(),
            EXIT_UNAVAILABLE,
            rf"http://127\.0\.0\.1:{service.port}/_hbone/22: ended after \S+ s: .*the container is stopping.*"
            r"\(reset with CONNECT_ERROR\)$",
        )


async def test_the_far_side_says_goaway_and_hangs_up() -> None:
    async with tunnel() as (command, stream, service):
        stream.peer.say_goaway(last_stream_id=stream.number)
        await stream.peer.answered()
        service.connections[0].drop()
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, "ended after .* s: the container is stopping")


async def test_a_reset_before_the_response() -> None:
    async with asked() as (command, stream, service):
        stream.reset(frames.INTERNAL_ERROR)
        assert_refusal(
            await command.ended(),
            EXIT_UNAVAILABLE,
            rf"http://127\.0\.0\.1:{service.port}/_hbone/22: not opened: .*INTERNAL_ERROR",
        )


async def test_the_far_side_dies_after_its_end() -> None:
    async with tunnel() as (command, stream, service):
        await stream.send(b"all of it")
        stream.end()
        assert await command.rest() == b"all of it"
        service.connections[0].drop()
        command.end()
        assert await command.ended() == Ended(EXIT_OK, b"", "")


# A line that drops: nothing comes any more, and nothing says so.

SOON = ("--keepalive", "0.2")
PATIENT = ("--keepalive", "1")
"""Within it a busy machine still answers."""


@pytest.mark.parametrize("when", ["waiting", "carrying"])
async def test_a_far_side_that_falls_silent(when: str) -> None:
    async with asked(*SOON) as (command, stream, service):
        if when == "carrying":
            stream.respond(200)
            await stream.send(b"hello")
            await command.read(5)
        stream.peer.pause()
        assert_refusal(
            await command.ended(),
            EXIT_UNAVAILABLE,
            rf"http://127\.0\.0\.1:{service.port}/_hbone/22: .*no answer from 127\.0\.0\.1 for 0\.4 s",
        )


async def test_silence_of_both_ends_is_no_dropped_line() -> None:
    async with tunnel(*PATIENT) as (command, stream, _):
        await stream.peer.until(lambda: stream.peer.pings >= 3)
        await stream.send(b"still here")
        assert await command.read(10) == b"still here"


async def test_a_reader_that_pauses_is_no_dropped_line(fds: Descriptors) -> None:
    read_end, write_end = fds.pipe()
    async with tunnel(*PATIENT, stdout=write_end) as (command, stream, _):
        count = await stream.fill()
        answered = stream.peer.pings
        await stream.peer.until(lambda: stream.peer.pings >= answered + 3)
        stream.end()
        command.end()
        assert len(await read(read_end, count)) == count
        assert await command.ended() == Ended(EXIT_OK, b"", "")


async def test_last_bytes_into_a_dropped_line_are_not_taken_for_sent() -> None:
    async with asked(*SOON) as (command, stream, _):
        stream.respond(200, end=True)
        await stream.peer.answered()
        stream.peer.pause()
        await command.send(b"the last word")
        command.end()
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, "no answer from 127.0.0.1 for 0.4 s")


async def test_nobody_is_asked_without_keepalive() -> None:
    async with asked("--keepalive", "0") as (command, stream, _):
        stream.respond(200, end=True)
        command.end()
        assert (await command.ended()).code == EXIT_OK


# Signals, and a reader that goes away: without a word.


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, EXIT_SIGINT),
        (signal.SIGTERM, EXIT_SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
@pytest.mark.parametrize("when", ["waiting", "carrying"])
async def test_signals(number: signal.Signals, code: int, when: str) -> None:
    async with asked() as (command, stream, _):
        if when == "carrying":
            stream.respond(200)
            await stream.send(b"hello")
            await command.read(5)
        command.signal(number)
        assert await command.ended() == Ended(code, b"", "")
        await stream.broken()


async def test_nohup() -> None:
    async with tunnel(shell='trap "" HUP; exec "$@"') as (command, stream, _):
        await stream.send(b"hello")
        await command.read(5)
        command.signal(signal.SIGHUP)
        await command.send(b"not bothered")
        assert await stream.read(12) == b"not bothered"


@pytest.mark.parametrize("when", ["carrying", "after the end"])
async def test_a_signal_leaves_the_output_as_it_was(fds: Descriptors, when: str) -> None:
    read_end, write_end = fds.pipe()
    async with tunnel(stdout=write_end) as (command, stream, service):
        await stream.send(os.urandom(200 << 10))
        if when == "after the end":
            stream.end()
            command.end()
            await service.connections[0].until(lambda: service.connections[0].lost)
        assert len(await read(read_end, 1)) == 1
        assert not os.get_blocking(write_end)
        command.signal(signal.SIGTERM)
        assert (await command.ended()).code == EXIT_SIGTERM
        assert os.get_blocking(write_end)


async def test_a_reader_that_goes_away(fds: Descriptors) -> None:
    read_end, write_end = fds.pipe()
    async with tunnel(stdout=write_end) as (command, stream, _):
        fds.close(read_end)
        await stream.send(b"is anybody there?")
        assert await command.ended() == Ended(128 + signal.SIGPIPE, b"", "")
        assert await stream.broken() == frames.CANCEL


async def test_a_full_disk_is_told_though_the_input_has_ended() -> None:
    async with tunnel(shell='exec "$@" >/dev/full') as (command, stream, _):
        command.end()
        assert await stream.rest() == b""
        await stream.send(b"x")
        assert_refusal(await command.ended(), EXIT_UNAVAILABLE, "standard output: No space left on device")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
async def test_a_closed_descriptor_is_not_taken_for_the_tunnel(closed: str) -> None:
    async with TcpServer.listening() as server:
        url = f"http://127.0.0.1:{server.port}/_hbone/22"
        async with running(url, shell=f'exec "$@" {closed}') as command:
            assert_refusal(await command.ended(), EXIT_USAGE, "standard input or output is closed")
        assert server.count == 0


async def test_without_standard_error_nothing_goes_to_standard_output() -> None:
    async with running(f"http://127.0.0.1:{closed_port()}/x", shell='exec "$@" 2>&-') as command:
        assert await command.ended() == Ended(EXIT_UNAVAILABLE, b"", "")


# What it costs to start.

NEVER_NEEDED = {
    *("cryptography", "OpenSSL", "jwt", "yaml", "kubernetes", "prometheus_client"),
    *(
        "gateway",
        "agent",
        "shared.ops",
        "shared.net.pool.pool",
        "shared.net.legs.contract.tls",
        "hbone.demo",
        "hbone.cloudrun",
    ),
    *("http.client", "http.server", "email", "xml", "multiprocessing", "unittest", "h2", "hyperframe"),
}


@pytest.mark.skipif("COVERAGE_RUN" in os.environ, reason="coverage.py imports modules of its own")
async def test_what_is_imported(tls: ssl.SSLContext, tmp_path: Path) -> None:
    """ssh users wait for it. What speaks HTTP/2 is imported while the network is on its way: that is a
    quarter of the time from exec to the first byte (bench.first_byte: 59 ms instead of 79, on a busy
    machine)."""
    token = unsigned_token(exp=FAR_FUTURE).encode()
    async with (
        MetadataServer(lambda _: Answer(token)) as metadata,
        Service.listening(tls) as service,
        running(
            *(f"{HOST}:22", "--ca", tmp_path / "ca.pem", "--connect", f"127.0.0.1:{service.port}"),
            environ={"GCE_METADATA_HOST": metadata.host},
            python=("-X", "importtime", "-m", "hbone"),
        ) as command,
    ):
        stream = await service.request()
        stream.respond(200, end=True)
        command.end()
        ended = await command.ended()
    assert ended.code == EXIT_OK
    imported = [line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()]
    assert imported.index("hbone.proxy_command") < imported.index("shared.http2.session_limits")
    needed = {"hbone.stdio_tunnel", "shared.http2.session_limits", "uvloop", "h11"}
    assert needed <= set(imported), "the list is one"
    wrong = {name for name in imported for never in NEVER_NEEDED if f"{name}.".startswith(f"{never}.")}
    assert wrong == set()
