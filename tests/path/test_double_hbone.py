"""Double HBONE through the whole path: a client as ztunnel is on the wire, hgate, the Cloud Run stand-in,
krun, and an app; and a sidecar's way to the same app through the same gateway."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.hbone.hbone_tunnel import TOO_OLD
from hbone.demo.processes import Process, Record
from shared.http2.frames import CANCEL
from tests.path.ambient_world import (
    AUTHORITY,
    HOST,
    OLD_AUTHORITY,
    OTHER_AUTHORITY,
    PARTNER,
    SNI,
    STRANGER,
    AmbientWorld,
    running,
)
from tests.path.app import READ_BYTES, App, echo, greet_and_answer, read
from tests.support.ambient_client import TRACE, CarriedTls, InStream, OnSocket
from tests.support.double_hbone import ConnectRefusedError, DoubleTunnel
from tests.support.forwards import patient_echo
from tests.support.hbone_port import CALLER
from tests.support.hellos import hello
from tests.support.world import PATIENCE_S

MIB = 1 << 20
WINDOW_BYTES = 4 << 20
"""Of a stream, ztunnel's."""


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[AmbientWorld]:
    with running(tmp_path_factory.mktemp("ambient"), app.address) as way:
        yield way


async def still_carries(tunnel: DoubleTunnel) -> None:
    """Holds that a tunnel to an app that echoes is as good as before."""
    await tunnel.stream.send(b"still there?")
    assert await tunnel.stream.read(12) == b"still there?"


async def heard(thread: asyncio.Future[bytes]) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await thread


async def line(process: Process, **wanted: Any) -> Record:
    """The line about a tunnel that is over with these fields; `target` is the tunnel's."""
    if "target" in wanted:
        wanted["tunnel.target"] = wanted.pop("target")
    return await asyncio.to_thread(
        process.wait_for, lambda record: wanted.items() <= record.items(), PATIENCE_S
    )


# What it carries.


async def test_a_request_and_its_answer(way: AmbientWorld, app: App) -> None:
    def behave(sock: socket.socket) -> None:
        with sock.makefile("rb") as request:
            while request.readline().strip():
                pass
            sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")

    app.behave = behave
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        assert dict(tunnel.stream.fields)[b"baggage"].endswith(b"service.name=hello")
        await tunnel.stream.send(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")
        tunnel.stream.end()
        assert (await tunnel.stream.rest()).endswith(b"\r\n\r\nhello")
    near = await line(way.gateway.process, route="hbone *.demo.svc.cluster.local", target=AUTHORITY)
    assert (near["status"], near["flags"], near["identity"]) == (200, "-", str(CALLER))
    far = await line(way.krun, route="hbone", target=AUTHORITY)
    assert (far["status"], far["flags"], far["identity"]) == (200, "-", str(CALLER))
    carrier = await line(way.krun, target="15008")
    assert (carrier["status"], carrier["flags"]) == (200, "-")
    assert near["traceparent"] == far["traceparent"] == TRACE, "one trace all the way"
    assert carrier["traceparent"] == TRACE
    assert (carrier["bytes_sent"], carrier["bytes_recv"]) == (near["bytes_sent"], near["bytes_recv"])


async def test_the_app_speaks_first(way: AmbientWorld, app: App) -> None:
    app.behave = greet_and_answer
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        assert await tunnel.stream.read(14) == b"who is there?\n"
        await tunnel.stream.send(b"me\n")
        assert await tunnel.stream.rest() == b"me\n"


async def test_a_client_that_ends_first(way: AmbientWorld, app: App) -> None:
    app.behave = lambda sock: sock.sendall(b"all of " + read(sock))
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        await tunnel.stream.send(b"it")
        tunnel.stream.end()
        assert await tunnel.stream.rest() == b"all of it"


async def test_an_app_that_ends_first(way: AmbientWorld, app: App) -> None:
    late: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    tell = asyncio.get_running_loop().call_soon_threadsafe

    def behave(sock: socket.socket) -> None:
        sock.sendall(b"that was it")
        sock.shutdown(socket.SHUT_WR)
        tell(late.set_result, read(sock))

    app.behave = behave
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        assert await tunnel.stream.rest() == b"that was it"
        await tunnel.stream.send(b"not yet")
        tunnel.stream.end()
        assert await heard(late) == b"not yet"


@pytest.mark.parametrize("held", ["inner", "outer"])
async def test_a_slow_reader(way: AmbientWorld, app: App, held: str) -> None:
    """What it does not read stays with the app; tunnels beside it in the same connection go on."""
    body = os.urandom(24 * MIB)
    slow = threading.Event()

    def behave(sock: socket.socket) -> None:
        if slow.is_set():
            patient_echo(sock)
        else:
            slow.set()
            sock.sendall(body)

    app.behave = behave
    async with way.ztunnel() as ztunnel, AsyncExitStack() as block:
        tunnel = await block.enter_async_context(ztunnel.tunnel(AUTHORITY))
        stalled = tunnel.stream if held == "inner" else tunnel.outer
        stalled.window_held = True
        await stalled.peer.until(lambda: stalled.peer.window_given(stalled) == 0)
        async with ztunnel.tunnel(AUTHORITY) as other:
            await still_carries(other)
        assert len(ztunnel.outers) == 1
        stalled.release_window()
        got = await tunnel.stream.read(len(body))
        assert hashlib.sha256(got).digest() == hashlib.sha256(body).digest()


# Its end.


async def test_a_client_that_lets_go_when_all_is_sent(way: AmbientWorld, app: App) -> None:
    """RST_STREAM CANCEL comes with the last bytes, before an app that reads slowly has any of them."""
    body = os.urandom(3 * MIB)
    all_of_it: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    tell = asyncio.get_running_loop().call_soon_threadsafe

    def behave(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        sock.sendall(b"go")
        sock.shutdown(socket.SHUT_WR)
        tell(all_of_it.set_result, read(sock))

    app.behave = behave
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        assert await tunnel.stream.rest() == b"go"
        await tunnel.stream.send(body)
        tunnel.stream.end()
        await tunnel.let_go()
        assert await heard(all_of_it) == body
    far = await line(way.krun, route="hbone", bytes_sent=len(body))
    assert far["flags"] == "-"


async def test_a_client_that_leaves_in_the_middle(way: AmbientWorld, app: App) -> None:
    """The app is told; the tunnel beside it is not."""
    resets: asyncio.Queue[bool] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def behave(sock: socket.socket) -> None:
        try:
            echo(sock)
            was_reset = False
        except ConnectionResetError:
            was_reset = True
        loop.call_soon_threadsafe(resets.put_nowait, was_reset)

    app.behave = behave
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as stays:
        async with ztunnel.tunnel(AUTHORITY) as leaves:
            await leaves.stream.send(b"half of i")
            assert await leaves.stream.read(9) == b"half of i"
            leaves.outer.reset(CANCEL)
        async with asyncio.timeout(PATIENCE_S):
            assert await resets.get(), "a part is not taken for the whole"
        await still_carries(stays)
        stays.stream.end()
        assert await stays.stream.rest() == b""
        assert not await resets.get()


# Who may not.


async def test_a_member_that_hgate_denies(way: AmbientWorld, app: App) -> None:
    app.behave = patient_echo
    before = app.connections
    async with way.ztunnel() as allowed, way.ztunnel(STRANGER) as ztunnel, allowed.tunnel(AUTHORITY) as good:
        with pytest.raises(ConnectRefusedError, match=r"outer 401: .*no rule allows it") as refused:
            async with ztunnel.tunnel(AUTHORITY):
                pass
        assert not refused.value.inner
        with pytest.raises(ConnectRefusedError, match=r"outer 401: .*no rule allows it"):
            async with allowed.tunnel(f"{HOST}:9090"):
                pass
        assert len(allowed.outers) == 1
        await still_carries(good)
    near = await line(way.gateway.process, identity=str(STRANGER))
    assert (near["status"], near["flags"]) == (401, "DENY")
    assert app.connections == before + 1


async def test_a_member_that_krun_denies(way: AmbientWorld, app: App) -> None:
    """In the inner handshake, before there is a CONNECT: hgate never sees what is in its tunnel."""
    app.behave = patient_echo
    before = app.connections
    async with way.ztunnel() as allowed, way.ztunnel(PARTNER) as ztunnel, allowed.tunnel(AUTHORITY) as good:
        outer = await ztunnel.connect(AUTHORITY)
        assert await outer.status() == 200
        inner = CarriedTls(InStream(outer), ztunnel.tls)
        await inner.shake()  # TLS 1.3: the server judges after the client is through
        with pytest.raises(ssl.SSLError, match="alert"):
            while data := await outer.some():
                inner.feed(data)
        await still_carries(good)
    far = await line(way.krun, flags="DENY")
    assert f"peer {PARTNER} denied: no rule allows it" in far["error"]
    assert app.connections == before + 1


async def test_a_service_that_krun_is_not(way: AmbientWorld, app: App) -> None:
    app.behave = patient_echo
    before = app.connections
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as good:
        with pytest.raises(ConnectRefusedError, match="no service of this workload") as refused:
            async with ztunnel.tunnel(OTHER_AUTHORITY):
                pass
        assert (refused.value.inner, refused.value.status) == (True, 401)
        await still_carries(good)
    far = await line(way.krun, route="hbone", target=OTHER_AUTHORITY)
    assert (far["status"], far["flags"], far["identity"]) == (401, "DENY", str(CALLER))
    assert app.connections == before + 1


@pytest.mark.parametrize(
    ("status", "kind", "meaning"),
    [
        (404, b"text/plain", f"no such target; known are 15003, 22: {TOO_OLD}"),
        (
            404,
            b"text/html",
            "no such service, its ingress setting keeps this caller out, or krun knows no such target",
        ),
        (403, b"text/html", "the caller lacks roles/run.invoker"),
    ],
    ids=["krun is too old", "no service", "no permission"],
)
async def test_a_service_that_refuses_inner_hbone(
    way: AmbientWorld, app: App, status: int, kind: bytes, meaning: str
) -> None:
    """One refusal that says what is known, and no second question; other streams go on."""
    app.behave = patient_echo
    async with way.ztunnel() as ztunnel, way.old_service() as old, ztunnel.tunnel(AUTHORITY) as good:
        outer = await ztunnel.connect(OLD_AUTHORITY)
        asked = await old.request()
        assert asked[b":path"] == b"/_hbone/15008"
        asked.respond(status, [(b"content-type", kind)])
        await asked.send(b"no such target; known are 15003, 22")
        asked.end()
        assert await outer.status() == 503
        said = (await outer.rest()).decode()
        assert said == f"answered {status}: {meaning}\n"
        assert not old.asked
        await still_carries(good)
    near = await line(way.gateway.process, target=OLD_AUTHORITY, status=503)
    assert near["flags"] == "STATUS" and "attempts" not in near


# What is no double HBONE.


async def test_bytes_that_are_no_hbone(way: AmbientWorld, app: App) -> None:
    app.behave = patient_echo
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as good:
        outer = await ztunnel.connect(AUTHORITY)
        assert await outer.status() == 200
        await outer.send(b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n")
        assert len(await outer.rest()) == 7, "one alert"
        await still_carries(good)
    far = await line(way.krun, flags="BAD_HELLO")
    assert "the first bytes are no TLS" in far["error"]


async def test_a_client_that_leaves_in_the_inner_handshake(way: AmbientWorld, app: App) -> None:
    app.behave = patient_echo
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as good:
        outer = await ztunnel.connect(AUTHORITY)
        assert await outer.status() == 200
        await outer.send(hello(SNI)[:100])
        outer.reset(CANCEL)
        far = await line(way.krun, error="tls handshake: the client closed the connection")
        assert far["flags"] == "DOWNSTREAM_RESET"
        await still_carries(good)


async def test_a_client_that_leaves_in_the_outer_handshake(way: AmbientWorld, app: App) -> None:
    app.behave = patient_echo
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as good:
        leaving = await OnSocket.to(ztunnel.port)
        await leaving.send(hello(SNI)[:100])
        leaving.reset()
        near = await line(way.gateway.process, flags="TLS_FAILURE")
        assert near["error"].startswith("tls handshake: ")
        await still_carries(good)


# Beside sidecars.


async def test_a_sidecar_to_the_same_app_at_the_same_time(way: AmbientWorld, app: App) -> None:
    app.behave = patient_echo
    body = os.urandom(2 * MIB)

    async def ambient() -> bytes:
        async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
            _, back = await asyncio.gather(tunnel.stream.send(body), tunnel.stream.read(len(body)))
            tunnel.stream.end()
            assert await tunnel.stream.rest() == b""
        return back

    async def sidecar() -> bytes:
        gateway = way.gateway.gateway
        reader, writer = await asyncio.open_connection(
            gateway.host, gateway.port, ssl=way.sidecar(), server_hostname=SNI
        )
        writer.write(body)
        back = await reader.readexactly(len(body))
        writer.close()
        await writer.wait_closed()
        return back

    async with asyncio.timeout(PATIENCE_S):
        both = await asyncio.gather(*(turn() for _ in range(4) for turn in (ambient, sidecar)))
    assert set(both) == {body}
    for target in ("15003", "15008"):
        await line(way.krun, target=target, status=200, flags="-")
