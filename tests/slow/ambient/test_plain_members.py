"""Members whose bytes are plain, through the whole path: Envoy and a client as ztunnel is on the wire, hgate,
the Cloud Run stand-in, krun with either mTLS end, and an app."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hbone.demo.processes import Process, Record
from shared.address import Address
from shared.http2.frames import CANCEL, CONNECT_ERROR
from tests.path.app import READ_BYTES, App, answer_lines, echo, greet_and_answer, read
from tests.path.hbone_peers import envoy_client
from tests.slow.ambient.plain_world import (
    AUTHORITY,
    DENIED_AUTHORITY,
    HELLO,
    HOST,
    OLD_AUTHORITY,
    STRANGER,
    WRONG_AUTHORITY,
    PlainWorld,
    running,
)
from tests.support.ambient_client import CLIENT, TRACE
from tests.support.double_hbone import Ztunnel
from tests.support.forwards import patient_echo
from tests.support.hbone_port import CALLER, GATEWAY
from tests.support.http2_peer import PeerStream
from tests.support.world import INBOUNDS, PATIENCE_S

MIB = 1 << 20
SIZE_BYTES = 64 * MIB
AT_ONCE = 50


@pytest.fixture(scope="module", params=INBOUNDS)
def way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App
) -> Iterator[PlainWorld]:
    with running(tmp_path_factory.mktemp(request.param), app.address, request.param) as way:
        yield way


@pytest.fixture(scope="module")
def envoy(way: PlainWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Where an Envoy takes plain TCP for AUTHORITY."""
    own = way.mesh.member(CALLER)
    folder = tmp_path_factory.mktemp("envoy")
    with envoy_client(folder, own, way.hbone, AUTHORITY, server_id=GATEWAY) as address:
        yield address


def connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), PATIENCE_S)


async def opened(ztunnel: Ztunnel, authority: str = AUTHORITY) -> PeerStream:
    """A tunnel."""
    stream = await ztunnel.connect(authority)
    assert await stream.status() == 200, await stream.rest()
    return stream


async def still_carries(stream: PeerStream) -> None:
    """Holds that a tunnel to an app that echoes is as good as before."""
    await stream.send(b"still there?")
    assert await stream.read(12) == b"still there?"


async def line(process: Process, **wanted: Any) -> Record:
    """The line about a tunnel that is over with these fields; `target` is the tunnel's."""
    if "target" in wanted:
        wanted["tunnel.target"] = wanted.pop("target")
    return await asyncio.to_thread(
        process.wait_for, lambda record: wanted.items() <= record.items(), PATIENCE_S
    )


# What it carries.


async def test_a_tunnel_and_its_lines(way: PlainWorld, app: App) -> None:
    app.behave = echo
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        await still_carries(stream)
        stream.end()
        assert await stream.rest() == b""
    near = await line(way.gateway.process, target=AUTHORITY)
    assert (near["status"], near["flags"], near["route"]) == (200, "-", HOST)
    assert (near["identity"], near["forwarded.for"]) == (str(CALLER), CLIENT)
    assert (near["bytes_sent"], near["bytes_recv"]) == (12, 12), "of the member's, without TLS"
    far = await line(way.krun, target="15003", traceparent=TRACE)
    assert (far["status"], far["flags"]) == (200, "-")
    assert far["forwarded.identity"] == str(CALLER), "by hgate's word"
    assert far["forwarded.for"] == near["src.addr"]


async def test_krun_knows_hgate(way: PlainWorld, app: App) -> None:
    """The identity that its rules judge is hgate's."""
    app.behave = echo
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        stream.end()
        assert await stream.rest() == b""
    await line(way.krun, identity=str(GATEWAY))


def test_64_mebibytes_there_and_back_from_an_envoy(way: PlainWorld, app: App, envoy: Address) -> None:
    app.behave = echo
    body = os.urandom(SIZE_BYTES)
    with connected(envoy) as client, ThreadPoolExecutor(1) as sender:

        def send() -> None:
            client.sendall(body)
            client.shutdown(socket.SHUT_WR)

        sending = sender.submit(send)
        got = read(client)
        sending.result()
    assert hashlib.sha256(got).digest() == hashlib.sha256(body).digest()
    near = way.gateway.process.wait_for(lambda record: record.get("bytes_recv") == len(body), PATIENCE_S)
    assert (near["status"], near["flags"], near["bytes_sent"]) == (200, "-", len(body))


async def test_64_mebibytes_there_and_back(way: PlainWorld, app: App) -> None:
    app.behave = patient_echo
    body = os.urandom(SIZE_BYTES)
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        received = bytearray()

        async def receive() -> None:
            while data := await stream.some():
                received.extend(data)

        async def send() -> None:
            await stream.send(body)
            stream.end()

        await asyncio.gather(send(), receive())
    assert hashlib.sha256(received).digest() == hashlib.sha256(body).digest()
    near = await line(way.gateway.process, bytes_sent=len(body), stream=1)
    assert (near["bytes_recv"], near["flags"]) == (len(body), "-")


def test_many_at_once_from_an_envoy(way: PlainWorld, app: App, envoy: Address) -> None:
    app.behave = answer_lines(1)

    def converse(number: int) -> bool:
        said = b"client %d\n" % number
        with connected(envoy) as client:
            client.sendall(said)
            return read(client) == said

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(converse, range(AT_ONCE))) == [True] * AT_ONCE


async def test_the_app_speaks_first(way: PlainWorld, app: App) -> None:
    app.behave = greet_and_answer
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        assert await stream.read(14) == b"who is there?\n"
        await stream.send(b"me\n")
        assert await stream.rest() == b"me\n"


async def test_a_member_that_does_not_wait_for_the_answer(way: PlainWorld, app: App) -> None:
    app.behave = lambda sock: sock.sendall(b"all of " + read(sock))
    async with way.ztunnel() as ztunnel:
        stream = await ztunnel.connect(AUTHORITY)
        await stream.send(b"it")
        stream.end()
        assert await stream.status() == 200
        assert await stream.rest() == b"all of it"


async def test_an_app_that_ends_first(way: PlainWorld, app: App) -> None:
    late: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    tell = asyncio.get_running_loop().call_soon_threadsafe

    def behave(sock: socket.socket) -> None:
        sock.sendall(b"that was it")
        sock.shutdown(socket.SHUT_WR)
        tell(late.set_result, read(sock))

    app.behave = behave
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        assert await stream.rest() == b"that was it"
        await stream.send(b"not yet")
        stream.end()
        async with asyncio.timeout(PATIENCE_S):
            assert await late == b"not yet"


async def test_a_slow_reader(way: PlainWorld, app: App) -> None:
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
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        stream.window_held = True
        await stream.peer.until(lambda: stream.peer.window_given(stream) == 0)
        await still_carries(await opened(ztunnel))
        assert len(ztunnel.outers) == 1
        stream.release_window()
        assert await stream.read(len(body)) == body


async def test_an_app_that_reads_slowly(way: PlainWorld, app: App) -> None:
    """The member is stopped; what it has sent by then is there in the end."""
    goes_on = threading.Event()
    sizes: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    tell = asyncio.get_running_loop().call_soon_threadsafe

    def behave(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        goes_on.wait(PATIENCE_S)
        tell(sizes.set_result, len(read(sock)))

    app.behave = behave
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        sent = await stream.fill()
        goes_on.set()
        stream.end()
        async with asyncio.timeout(PATIENCE_S):
            assert await sizes == sent
        assert await stream.rest() == b""


# Its end.


async def test_a_member_that_leaves_in_the_middle(way: PlainWorld, app: App) -> None:
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
    async with way.ztunnel() as ztunnel:
        stays, leaves = await opened(ztunnel), await opened(ztunnel)
        await still_carries(leaves)
        leaves.reset(CANCEL)
        async with asyncio.timeout(PATIENCE_S):
            assert await resets.get(), "a part is not taken for the whole"
        await still_carries(stays)
        stays.end()
        assert await stays.rest() == b""
        async with asyncio.timeout(PATIENCE_S):
            assert not await resets.get()
    near = await line(way.gateway.process, flags="DOWNSTREAM_RESET")
    assert near["route"] == HOST


async def test_an_app_that_breaks_off(way: PlainWorld, app: App) -> None:
    def behave(sock: socket.socket) -> None:
        sock.recv(READ_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    app.behave = behave
    async with way.ztunnel() as ztunnel:
        stream = await opened(ztunnel)
        await stream.send(b"break")
        assert await stream.broken() == CONNECT_ERROR, "no end that could be taken for one in order"
    near = await line(way.gateway.process, flags="UPSTREAM_RESET")
    assert (near["bytes_sent"], near["bytes_recv"]) == (5, 0)


# Who may not.


async def test_a_member_that_hgate_denies(way: PlainWorld, app: App) -> None:
    before = app.connections
    async with way.ztunnel(STRANGER) as ztunnel:
        stream = await ztunnel.connect(AUTHORITY)
        assert await stream.status() == 401
        assert (await stream.rest()).endswith(b"no rule allows it\n")
    near = await line(way.gateway.process, identity=str(STRANGER))
    assert (near["status"], near["flags"]) == (401, "DENY")
    assert app.connections == before


async def test_a_hgate_that_krun_denies(way: PlainWorld, app: App) -> None:
    """With TLS 1.3 the far side judges when hgate is through: the tunnel is open, and breaks at once."""
    app.behave = patient_echo
    before = app.connections
    async with way.ztunnel() as ztunnel:
        stays = await opened(ztunnel)
        stream = await ztunnel.connect(DENIED_AUTHORITY)
        assert await stream.broken() == CONNECT_ERROR  # perhaps in one read with the 200
        assert stream[b":status"] == b"200"
        await still_carries(stays)
    near = await line(way.gateway.process, target=DENIED_AUTHORITY)
    assert (near["flags"], near["bytes_recv"]) == ("UPSTREAM_RESET", 0)
    assert "tls: " in near["error"] and "alert" in near["error"]
    assert app.connections == before + 1


async def test_the_wrong_far_side(way: PlainWorld, app: App) -> None:
    app.behave = patient_echo
    before = app.connections
    async with way.ztunnel() as ztunnel:
        stays = await opened(ztunnel)
        stream = await ztunnel.connect(WRONG_AUTHORITY)
        assert await stream.status() == 503
        said = (await stream.rest()).decode()
        assert said == f"inside the tunnel: peer {HELLO} denied: no rule allows it\n"
        await still_carries(stays)
    near = await line(way.gateway.process, target=WRONG_AUTHORITY)
    assert (near["status"], near["flags"]) == (503, "CONNECT")
    assert app.connections == before + 1


@pytest.mark.parametrize(
    ("authority", "failure", "detail"),
    [
        (AUTHORITY, None, f"{HELLO}, certificate until "),
        (WRONG_AUTHORITY, "PEER_IDENTITY", f"inside the tunnel: peer {HELLO} denied: no rule allows it"),
        (DENIED_AUTHORITY, "POLICY_DENIED", "after the handshake: "),
    ],
    ids=["right", "wrong", "denied"],
)
def test_hgate_doctor_looks_inside(
    way: PlainWorld, app: App, authority: str, failure: str | None, detail: str
) -> None:
    app.behave = patient_echo
    arguments = ("doctor", "--config", str(way.gateway.file), "--authority", authority, "--json")
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True,
        timeout=PATIENCE_S,
        env=os.environ | way.environ,
    )
    report = json.loads(done.stdout)["routes"][0]["report"]
    found = report["failure"] or next(hop for hop in report["hops"] if hop["name"] == "peer")
    assert found["name"] == (failure or "peer"), report
    assert found["detail"].startswith(detail)
    assert done.returncode == report["exit_code"]


@pytest.mark.parametrize(
    ("status", "meaning"),
    [(404, "or krun knows no such target"), (403, "the caller lacks roles/run.invoker")],
)
async def test_a_krun_that_refuses(way: PlainWorld, app: App, status: int, meaning: str) -> None:
    app.behave = patient_echo
    async with way.ztunnel() as ztunnel, way.old_service() as old:
        stays = await opened(ztunnel)
        stream = await ztunnel.connect(OLD_AUTHORITY)
        asked = await old.request()
        assert asked[b"x-forwarded-client-cert"] == f"By={GATEWAY};URI={CALLER}".encode()
        asked.respond(status)
        asked.end()
        assert await stream.status() == 503
        said = (await stream.rest()).decode()
        assert said.startswith(f"answered {status}: ") and said.endswith(f"{meaning}\n")
        assert not old.asked
        await still_carries(stays)
    near = await line(way.gateway.process, target=OLD_AUTHORITY, status=503)
    assert near["flags"] == "STATUS" and "attempts" not in near
