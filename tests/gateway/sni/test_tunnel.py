"""One connection through the gateway, from its hello to its line in the access log.

The client is a socket, the service is played by the h2 library, the metadata server speaks real HTTP; between
them is the whole gateway. Where a test tells of the original, cloud-run-mesh got that wrong.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from gateway.config.limit_settings import Limits
from gateway.ports.admission import Admission
from gateway.ports.hello import Hellos
from gateway.rules.routes import Route, RouteTable, Target
from gateway.sni.cluster_endpoints import ClusterEndpoints
from gateway.sni.forward import Forward
from gateway.sni.token_sources import TokenSources
from gateway.sni.tunnel import FIRST_FLIGHT_BYTES, Tunnels
from gateway.sni.upstream import Upstreams
from shared.address import Address
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.errors import HboneError
from shared.listen import bound_address, listen
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits
from shared.net.relay.tunnel_clock import TunnelClock
from shared.ops.access_log import AccessLog
from shared.ops.metrics import TunnelMetrics
from shared.tls.istio_sni import Destination
from shared.tunnel.request_context import read_traceparent
from tests.shared.net.loopback import until
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR, NAME, hello
from tests.support.metadata_server import closed_port
from tests.support.retried_tunnels import SAID, end
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

CANCEL = 8
NO_ERROR = 0
REFUSED_STREAM = 7
BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""


# In good order.


async def test_a_tunnel_from_hello_to_line(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "https://{service}.a.run.app"}))
    said = hello()
    client = await world.client(said)
    stream = await world.service.request()
    assert [request.audience for request in world.metadata.requests] == ["https://hello.a.run.app"]
    authorization = stream[b"authorization"]
    assert authorization.startswith(b"Bearer ey")
    assert stream.fields == [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":authority", b"hello.example"),
        (b":path", b"/_hbone/15003"),
        (b"authorization", authorization),
        (b"traceparent", stream[b"traceparent"]),
    ]
    assert read_traceparent(stream[b"traceparent"])
    stream.respond(200)
    assert await stream.read(len(said)) == said
    await world.echoes(client, stream)
    client.end()
    assert await stream.rest() == b""
    stream.end()
    assert await client.rest() == b""
    line = await gateway.line()
    assert {key: line[key] for key in line if key not in ("timestamp", "setup", "duration")} == {
        "severity": "INFO",
        "message": "connection complete",
        "logger": "hbone.access",
        "component": "hgate",
        "src.addr": client.address,
        "sni": NAME,
        "route": GLOB,
        "origin": "http://hello.example/_hbone/15003",
        "dst.addr": f"127.0.0.1:{world.service.port}",
        "stream": stream.number,
        "status": 200,
        "traceparent": stream[b"traceparent"].decode(),
        "bytes_sent": len(said) + 5,
        "bytes_recv": 8,
        "flags": "-",
    }
    assert await gateway.metric("hbone_sent_bytes_total", route=GLOB) == len(said) + 5
    assert await gateway.metric("hbone_received_bytes_total", route=GLOB) == 8
    assert await gateway.metric("hbone_tunnels_opened_total", route=GLOB) == 1
    assert await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="-") == 1
    assert await gateway.metric("hbone_tunnel_setup_seconds_count") == 1
    await world.nothing_is_left()


async def test_bytes_are_counted_while_a_tunnel_is_open(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    await world.echoes(client, stream)
    sent = len(hello()) + 5
    assert await gateway.metric("hbone_sent_bytes_total", route=GLOB) == sent
    assert await gateway.metric("hbone_tunnels_open", route=GLOB) == 1
    [shown] = await gateway.dump("/tunnels")
    assert (shown["src.addr"], shown["sni"], shown["route"]) == (client.address, NAME, GLOB)
    assert (shown["bytes_sent"], shown["bytes_recv"], shown["stream"]) == (sent, 8, stream.number)
    await world.echoes(client, stream)
    assert await gateway.metric("hbone_sent_bytes_total", route=GLOB) == sent + 5, "each byte once"


async def test_many_bytes_both_ways_at_once(world: World) -> None:
    await world.start()
    client, stream = await world.open()
    client.send_soon(BIG * 5)
    client.end()
    async with asyncio.TaskGroup() as both:
        sent = both.create_task(stream.rest())
        received = both.create_task(client.rest())  # at once: the kernel need not hold all of it
        await stream.send(BIG * 5)
        stream.end()
    assert received.result() == BIG * 5
    assert sent.result() == BIG * 5
    line = await world.gateway.line()
    assert (line["bytes_sent"], line["bytes_recv"]) == (len(hello()) + 5 * len(BIG), 5 * len(BIG))


async def test_tunnels_share_a_connection(world: World) -> None:
    """The original made a TCP connection with TLS for each."""
    await world.start()
    tunnels = [await world.open() for _ in range(20)]
    for client, stream in tunnels:
        await world.echoes(client, stream)
    assert len(world.service.connections) == 1
    (shown,) = await world.gateway.dump("/connections")
    assert 0 < shown.pop("age_s") < PATIENCE_S
    assert shown == {
        "origin": f"http://hello.example at 127.0.0.1:{world.service.port}",
        "peer": f"127.0.0.1:{world.service.port}",
        "state": "open",
        "streams": 20,
        "room": 80,
    }


async def test_a_connection_that_is_let_go_says_so(world: World) -> None:
    await world.start()
    await world.open()
    world.service.connections[0].say_goaway(1)
    while (await world.gateway.dump("/connections"))[0]["state"] == "open":
        pass
    (shown,) = await world.gateway.dump("/connections")
    assert (shown["state"], shown["streams"], shown["room"]) == ("draining: goaway", 1, 0)
    origin = "http://hello.example"
    assert await world.gateway.metric("hbone_upstream_connections_draining", origin=origin) == 1


async def test_an_idle_tunnel_outlives_every_deadline(world: World) -> None:
    """The original cut a tunnel that was silent for a while."""
    await world.start(hello_timeout="100ms", connect_timeout="100ms", response_timeout="100ms")
    client, stream = await world.open()
    silent, _ = await world.open()
    await asyncio.sleep(0.3)
    await world.echoes(client, stream)
    assert len(await world.gateway.dump("/tunnels")) == 2
    silent.reset()


async def test_connect_instead_of_post(world: World) -> None:
    """Plain CONNECT: Go's servers refuse one with `:protocol` (envoy#20378)."""
    await world.start(tunnel(world.service.port, method="CONNECT", tunnel="http://ztunnel:15009"))
    traces = set()
    for _ in range(2):  # each tells of its own client
        client = await world.client()
        stream = await world.service.request()
        assert stream.fields == [
            (b":method", b"CONNECT"),
            (b":authority", b"hello.demo.svc.cluster.local:8080"),
            (b"baggage", b"k8s.namespace.name=demo,service.name=hello"),
            (b"forwarded", f'for="{client.address}"'.encode()),
            (b"traceparent", stream[b"traceparent"]),
        ]
        traces.add(stream[b"traceparent"])
        stream.respond(200)
        assert await stream.read(len(hello()))
        await world.echoes(client, stream)
    assert len(traces) == 2


async def test_a_bare_name(world: World) -> None:
    await world.start()
    await world.client(hello("hello.demo.svc.cluster.local", alpn=("h2",)))
    assert (await world.service.request())[b":authority"] == b"hello.example"


# Forwarding.


async def test_a_forward_that_nobody_takes(world: World) -> None:
    port = closed_port()
    gateway = await world.start({"host": GLOB, "forward": f"127.0.0.1:{port}"})
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("CONNECT", f"connect to 127.0.0.1:{port}: connection refused")
    await world.nothing_is_left()


# The order of ends, and breaks.


async def test_the_service_ends_first(world: World) -> None:
    """The original could not end its side before the client had ended its own."""
    await world.start()
    client, stream = await world.open()
    await stream.send(b"all I have")
    stream.end()
    assert await client.rest() == b"all I have"
    await client.send(b"but I have more")
    assert await stream.read(15) == b"but I have more"
    client.end()
    assert await stream.rest() == b""
    assert (await world.gateway.line())["flags"] == "-"


async def test_a_reset_in_good_order_after_the_end_loses_nothing(world: World) -> None:
    """What a front end does that takes a complete response for the end of it all (RFC 9113 section 8.1)."""
    await world.start()
    client, stream = await world.open()
    await stream.send(BIG)
    stream.end()
    stream.reset(NO_ERROR)
    assert await client.rest() == BIG
    client.end()
    assert (await world.gateway.line())["flags"] == "-"


async def test_the_service_breaks_off(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    stream.reset(REFUSED_STREAM)
    assert await client.was_reset()
    line = await gateway.line()
    assert (line["severity"], line["flags"]) == ("ERROR", "UPSTREAM_RESET")
    assert line["error"] == "stream reset by the peer: REFUSED_STREAM"
    assert await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="UPSTREAM_RESET") == 1
    await world.nothing_is_left()


async def test_the_services_connection_breaks(world: World) -> None:
    await world.start()
    first, _ = await world.open()
    second, stream = await world.open()
    stream.peer.drop()
    assert await first.was_reset()
    assert await second.was_reset()
    assert {(await world.gateway.line())["flags"] for _ in "12"} == {"UPSTREAM_RESET"}
    client, stream = await world.open()
    await world.echoes(client, stream)
    assert len(world.service.connections) == 2


async def test_the_client_breaks_off(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    client.reset()
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert line["flags"] == "DOWNSTREAM_RESET"
    assert await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="DOWNSTREAM_RESET") == 1
    await world.nothing_is_left()


# While the tunnel is being opened.


@pytest.mark.parametrize(("first_flight", "sent"), [("with_request", True), ("after_answer", False)])
async def test_what_is_sent_before_the_200(world: World, first_flight: str, sent: bool) -> None:
    """What had come with the ClientHello, or nothing at all, as the route says."""
    await world.start(tunnel(world.service.port, first_flight=first_flight))
    witness, witnessed = await world.open()
    said = SAID + BIG
    client = await world.client(SAID)
    client.send_soon(BIG)
    stream = await world.service.request()
    await world.echoes(witness, witnessed)
    assert said.startswith(stream.data)
    assert (len(SAID) <= len(stream.data) <= FIRST_FLIGHT_BYTES) if sent else not stream.data
    stream.respond(200)
    assert len(await stream.read(len(said))) == len(said)
    client.end()
    assert await stream.rest() == b""
    stream.end()
    line = await world.gateway.line()
    assert line["bytes_sent"] == len(said), "all is counted once"


@pytest.mark.parametrize("size", [len(SAID) + 1, READ_BYTES, FIRST_FLIGHT_BYTES, FIRST_FLIGHT_BYTES + 1000])
async def test_a_first_flight_of_any_size(world: World, size: int) -> None:
    """A client that has filled what is kept is read on afterwards."""
    await world.start()
    said = (SAID + BIG)[:size]
    client = await world.client(said)
    stream = await world.service.request()
    await stream.peer.answered()
    assert 0 < len(stream.data) <= FIRST_FLIGHT_BYTES
    stream.respond(200)
    assert await stream.read(size) == said
    await world.echoes(client, stream)
    await end(client, stream)


async def test_everything_that_came_early_is_delivered_in_order(world: World) -> None:
    await world.start()
    said = hello() + BIG
    client = await world.client(said)
    stream = await world.service.request()
    client.end()
    stream.respond(200)
    assert await stream.rest() == said
    await stream.send(b"bye")
    stream.end()
    assert await client.rest() == b"bye"
    assert (await world.gateway.line())["flags"] == "-"


@pytest.mark.parametrize("reached", [False, True], ids=["with a task", "without"])
async def test_a_client_that_breaks_off_early(world: World, reached: bool) -> None:
    await world.start()
    if reached:
        await end(*await world.open())
        await world.gateway.line()
    client = await world.client()
    stream = await world.service.request()
    client.reset()
    await gone(world, client)
    await stream.peer.answered()
    assert stream.reset_code is None, "many of these would be a rapid reset (CVE-2023-44487)"
    stream.respond(200)
    assert await stream.broken() == CANCEL
    assert (await world.gateway.line())["flags"] == "DOWNSTREAM_RESET"
    await world.nothing_is_left()


async def test_a_client_that_breaks_off_early_and_is_refused(world: World) -> None:
    """With a status that would be asked for once more, if there were somebody to ask for."""
    await world.start()
    client = await world.client()
    stream = await world.service.request()
    client.reset()
    await gone(world, client)
    stream.respond(503, end=True)
    line = await world.gateway.line()
    assert (line["severity"], line["message"], line["status"]) == ("INFO", "connection complete", 503)
    assert (line["flags"], line["error"]) == (
        "DOWNSTREAM_RESET",
        "the client broke off before its tunnel was open",
    )
    assert await world.gateway.refused() == {"DOWNSTREAM_RESET": 1, "NOT_TLS": 1}
    await world.open()
    assert not world.service.asked


async def test_a_client_that_breaks_off_while_its_refusal_is_read(world: World) -> None:
    await world.start()
    client = await world.client()
    stream = await world.service.request()
    stream.respond(403, [(b"content-type", b"text/plain")])
    await stream.peer.answered()
    client.reset()
    assert await stream.broken() == CANCEL
    line = await world.gateway.line()
    assert (line["flags"], line["status"]) == ("DOWNSTREAM_RESET", 403)
    await world.nothing_is_left()


async def test_a_client_that_breaks_off_before_its_token_is_there(world: World) -> None:
    await world.start(tunnel(world.service.port, token={"audience": "x"}))
    world.metadata.gate.clear()
    client = await world.client()
    await world.metadata.seen(1)
    client.reset()
    assert (await world.gateway.line())["flags"] == "DOWNSTREAM_RESET"
    world.metadata.gate.set()
    await world.open()
    assert not world.service.asked, "no stream is opened for it"
    assert len(world.metadata.requests) == 1, "and its token serves the next"


async def test_a_client_that_breaks_off_while_its_service_is_dialled(world: World, target: TcpServer) -> None:
    """The dial goes on, for others may need the connection; the client is let go."""
    gateway = await world.start(tunnel(target.port))
    client = await world.client()
    await target.accept()
    client.reset()
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"
    await world.nothing_is_left()


async def gone(world: World, client: TcpPeer) -> None:
    """Returns when the gateway has been told of a reset: a later connection has been served since."""
    await client.close()
    probe = await world.gateway.client(b"no hello")
    await probe.was_reset()
    assert (await world.gateway.line())["flags"] == "NOT_TLS"


# A fault of ours.


class FaultyTable(RouteTable):
    def match(self, destination: Destination) -> Target:
        raise ZeroDivisionError("fault")


@pytest.fixture
def access_log() -> Iterator[AccessLog]:
    with open(os.devnull, "wb") as nowhere:
        access_log = AccessLog(nowhere, "json", "hgate")
    yield access_log
    access_log.close()


LIMITS = Limits(
    hello_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S, response_timeout_s=PATIENCE_S, splice_pipes=0
)


def made(routes: RouteTable, access_log: AccessLog, metrics: TunnelMetrics) -> Tunnels:
    """Tunnels by themselves, without a gateway around them."""
    pool = Pool(limits=PoolLimits(connect_timeout_s=PATIENCE_S, streams_per_connection=1))
    upstreams = Upstreams(
        pool,
        TokenSources(MetadataMinter("127.0.0.1:1")),
        metrics,
        limits=LIMITS,
    )
    return Tunnels(
        routes,
        upstreams,
        access_log,
        metrics,
        Admission(LIMITS, open_connections=lambda: 0),
        TunnelClock(),
        forward=Forward(LIMITS, ClusterEndpoints()),
        limits=LIMITS,
    )


async def test_a_name_that_many_ask_for_is_kept_once(access_log: AccessLog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        route = Route("**", forward=Address("127.0.0.1", service.getsockname()[1]), alpn="any")
        tunnels = made(RouteTable([route]), access_log, TunnelMetrics())
        hellos = Hellos(LIMITS, taken=tunnels.accept, refused=lambda *_: None)
        listener = await listen(Address("127.0.0.1", 0), hellos.accepted, purpose="test")
        port = bound_address(listener).port
        async with TcpPeer.connected(port) as first, TcpPeer.connected(port) as second:
            await first.send(hello())
            await second.send(hello())
            await until(lambda: sum(tunnel.relay is not None for tunnel in tunnels.open) == 2)
            one, other = tunnels.open
            assert one.record.sni is other.record.sni and one.record.sni == NAME
            tunnels.abort_all(HboneError("over"))
        listener.close()
    await until(lambda: not tunnels.open)


async def test_a_fault_of_ours_costs_one_connection(
    access_log: AccessLog, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = TunnelMetrics()
    tunnels = made(FaultyTable(()), access_log, metrics)
    hellos = Hellos(LIMITS, taken=tunnels.accept, refused=lambda *_: None)
    listener = await listen(Address("127.0.0.1", 0), hellos.accepted, purpose="test")
    async with TcpPeer.connected(bound_address(listener).port) as client:
        await client.send(hello())
        assert await client.rest() == INTERNAL_ERROR
    assert tunnels.open == set()
    assert 'hbone_connections_refused_total{flags="INTERNAL"} 1.0' in metrics.render("")[1].decode()
    assert caplog.messages == [f"task tunnel {client.address} failed: ZeroDivisionError: fault"]
    listener.close()


async def test_a_tunnel_that_is_forgotten_half_closed(world: World) -> None:
    """nghttpx, of a CONNECT, never passes the client's end on."""
    gateway = await world.start(half_closed_timeout="200ms")
    client, stream = await world.open()
    client.end()
    assert await stream.rest() == b""
    await stream.send(b"an answer, and no end")
    assert await client.read(21) == b"an answer, and no end"
    assert await client.was_reset()
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert line["flags"] == "HALF_CLOSED"
    assert line["error"] == "half-closed: the client has ended, and for 0.2 s nothing came back"
    assert await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="HALF_CLOSED") == 1
    await world.nothing_is_left()
