"""Plain requests through the proxy: what their target gets, what their client gets, and curl."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import Flag
from shared.tasks import spawn
from tests.support.egress_world import EgressWorld, egress_world
from tests.support.tcp_peer import TcpPeer

HEAD = b"\r\n\r\n"


def get(world: EgressWorld, *fields: str, path: str = "/a?b=c", method: str = "GET") -> bytes:
    host = f"localhost:{world.target.port}"
    return "\r\n".join([f"{method} http://{host}{path} HTTP/1.1", f"host: {host}", *fields, "", ""]).encode()


async def test_the_target_gets_the_request_without_what_is_for_the_proxy(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        fields = (
            *(
                "Proxy-Authorization: Basic x",
                "Proxy-Connection: keep-alive",
                "Connection: x-hop",
                "X-Hop: 1",
            ),
            *("Keep-Alive: 5", "TE: trailers", "X-Own: 2", "Authorization: Basic own"),
        )
        client = await world.asked(get(world, *fields))
        target = await world.target.accept()
        asked = (await target.read_until(HEAD)).decode().split("\r\n")
        assert asked[0] == "GET /a?b=c HTTP/1.1"
        assert sorted(asked[1:-2]) == [
            "authorization: Basic own",
            f"host: localhost:{world.target.port}",
            "via: 1.1 krun",
            "x-own: 2",
        ]
        await target.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nkeep-alive: 5\r\nx-there: 3\r\n\r\nhi")
        answer = (await client.read_until(HEAD)).decode().lower()
        assert await client.read(2) == b"hi"
        assert "x-there: 3" in answer
        assert "keep-alive" not in answer
        assert await target.rest() == b""  # an end, and no reset
        record = await world.record()
        assert (record.route, record.status, record.flag) == ("egress/request", 200, Flag.NONE)
        assert (record.received_bytes, record.name) == (2, f"localhost:{world.target.port}")


async def test_a_connection_carries_one_request_after_the_other(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.client()
        for number in range(3):
            await client.send(get(world, "content-length: 1", method="POST") + b"%d" % number)
            target = await world.target.accept()
            await target.read_until(HEAD)
            assert await target.read(1) == b"%d" % number
            await target.send(
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n%d\r\n0\r\n\r\n" % number
            )
            await client.read_until(HEAD)
            assert await client.read_until(b"0\r\n\r\n") == b"1\r\n%d\r\n0\r\n\r\n" % number
        await client.send(b"CONNECT localhost:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port)
        assert (await client.read_until(HEAD)).startswith(b"HTTP/1.1 200 ")
        await (await world.target.accept()).send(b"x")
        assert await client.read(1) == b"x"


async def test_two_requests_at_once_get_their_answers_in_order(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(get(world, path="/1") + get(world, path="/2"))
        for path in (b"/1", b"/2"):
            target = await world.target.accept()
            assert (await target.read_until(HEAD)).startswith(b"GET %b " % path)
            await target.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + path)
            await client.read_until(HEAD)
            assert await client.read(2) == path


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET https://localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET ftp://localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nhost: other\r\n\r\n", 400),
        (b"GET http://a@localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET http://localhost:0/ HTTP/1.1\r\nhost: localhost:0\r\n\r\n", 400),
        (b"GET http:/// HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\n\r\n", 400),
        (b"GET http://localhost/#x HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (
            b"POST http://localhost/ HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n"
            b"transfer-encoding: chunked\r\n\r\n",
            400,
        ),
        (
            b"GET http://localhost/ HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-key: x\r\n\r\n",
            400,
        ),
        (b"\x16\x03\x01\x00\x05hello\r\n\r\n", 400),
        (b"GET http://denied.test/ HTTP/1.1\r\nhost: denied.test\r\n\r\n", 403),
        (b"GET http://127.0.0.1:1/ HTTP/1.1\r\nhost: 127.0.0.1:1\r\n\r\n", 502),
    ],
)
async def test_requests_that_are_refused(tmp_path: Path, request_: bytes, status: int) -> None:
    async with egress_world(tmp_path, deny=("denied.test:*",)) as world:
        client = await world.asked(request_)
        head = await client.read_until(HEAD)
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert (await client.read_until(b"\n")).startswith(b"krun: ")
        assert world.target.count == 0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "closed the connection before its answer was complete"),
        (b"SSH-2.0-x\r\n", "does not speak HTTP/1.1"),
        (b"\x00\x00\x12\x04", "speaks HTTP/2, not HTTP/1.1\n"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "switched to another protocol"),
    ],
)
async def test_a_target_that_does_not_answer(tmp_path: Path, said: bytes, why: str) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(get(world))
        target = await world.target.accept()
        await target.read_until(HEAD)
        await target.send(said)
        target.end()
        assert (await client.read_until(HEAD)).startswith(b"HTTP/1.1 502 ")
        line = (await client.read_until(b"\n")).decode()
        assert why in line
        assert f"localhost:{world.target.port}" in line
        assert (await world.record()).flag is Flag.UPSTREAM_RESET


async def test_an_answer_that_is_cut_off_does_not_look_whole(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(get(world))
        target = await world.target.accept()
        await target.read_until(HEAD)
        await target.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        target.end()
        assert await client.was_reset()


async def test_a_client_that_leaves_breaks_its_request_off(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(get(world))
        target = await world.target.accept()
        await target.read_until(HEAD)
        client.reset()
        assert await target.was_reset()
        assert (await world.record()).flag is Flag.DOWNSTREAM_RESET


async def test_a_client_that_closes_before_its_answer_gives_its_place_back(tmp_path: Path) -> None:
    """As curl does after `--max-time`: nobody can tell its close from the end of one direction."""
    async with egress_world(tmp_path) as world:
        client = await world.asked(get(world))
        target = await world.target.accept()
        await target.read_until(HEAD)
        await client.close()
        assert await target.was_reset()
        record = await world.record()
        assert (record.flag, record.opened) == (Flag.DOWNSTREAM_RESET, True)
        assert world.egress.open_connections == 0


async def test_a_fault_of_ours_costs_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise RuntimeError("a fault")

    async with egress_world(tmp_path) as world:
        with monkeypatch.context() as patch:
            patch.setattr("shared.tunnel.opening.Opening.run", broken)
            client = await world.asked(get(world))
            assert (await client.read_until(HEAD)).startswith(b"HTTP/1.1 502 ")
            assert await client.read_until(b"\n") == b"krun: a fault in krun: its log says more\n"
        assert (await world.record()).flag is Flag.INTERNAL
        await client.send(get(world))
        await (await world.target.accept()).read_until(HEAD)


async def test_curl_by_each_of_the_ways(tmp_path: Path) -> None:
    async def serve(world: EgressWorld) -> None:
        target: TcpPeer = await world.target.accept()
        await target.read_until(HEAD)
        await target.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        target.end()

    async with egress_world(tmp_path) as world:
        url = f"http://localhost:{world.target.port}/"
        http, socks = f"http://127.0.0.1:{world.proxy}", f"127.0.0.1:{world.proxy}"
        local = f"http://127.0.0.1:{world.egress.ports[0].listen.port}/"
        for options in (
            ("-x", http, url),
            ("-x", http, "--proxytunnel", url),
            ("--socks5-hostname", socks, url),
            ("--socks4a", socks, url),
            (local,),
        ):
            serving = spawn(serve(world), name="serve")
            assert await world.curl("--noproxy", "", *options) == (0, "hello"), options
            await serving
        routes = [(await world.record()).route for _ in range(5)]
        assert routes == [
            *("egress/request", "egress/connect", "egress/socks", "egress/socks", "egress/local"),
        ]
        assert set(world.looked_up) == {"gateway.test"}


async def test_curl_is_told_of_a_refusal(tmp_path: Path) -> None:
    async with egress_world(tmp_path, allow=("other.test:80",)) as world:
        http, socks = f"http://127.0.0.1:{world.proxy}", f"127.0.0.1:{world.proxy}"
        code, said = await world.curl("--noproxy", "", "-x", http, "http://x.test/", "-w", "%{http_code}")
        assert (code, said) == (0, "krun: x.test:80 denied: HBONE_EGRESS_ALLOW does not have it\n403")
        assert (await world.curl("--noproxy", "", "-x", http, "--proxytunnel", "http://x.test/"))[0] == 56
        assert (await world.curl("--noproxy", "", "--socks5-hostname", socks, "http://x.test/"))[0] == 97


async def test_krun_s_end_is_a_502(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(get(world))
        target = await world.target.accept()
        await target.read_until(HEAD)
        assert [str(one.record.name) for one in world.egress.tunnels] == [f"localhost:{world.target.port}"]
        closing = spawn(world.egress.close(), name="close")
        assert (await client.read_until(HEAD)).startswith(b"HTTP/1.1 502 ")
        await closing
        assert Address.parse(str((await world.record()).name)).port == world.target.port
