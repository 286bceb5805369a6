"""A broken connection stays one, from end to end, and the log lines say who broke it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from OpenSSL import SSL

from hbone.demo.processes import Process, Record
from shared.ops.access_log import LOGGER as ACCESS_LOGGER
from tests.path.app import App, say_back_and_look
from tests.path.tls_client import connected, reset_on_close
from tests.support.tls_client import read_to_the_end
from tests.support.world import CALLER, INBOUNDS, PATIENCE_S, World, running

both_ends = pytest.mark.parametrize("world", INBOUNDS, indirect=True)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App
) -> Iterator[World]:
    """One for each test, so that its logs have one connection only."""
    folder = tmp_path_factory.mktemp(request.param)
    with running(folder, inbound=request.param, app=app.address) as world:
        yield world


def break_off_by_client(world: World, app: App) -> bytes | None:
    """Ends a connection with RST after an exchange; what the app then reads, None for a reset."""
    seen: SimpleQueue[bytes | None] = SimpleQueue()
    app.behave = say_back_and_look(seen)
    with connected(world) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
        reset_on_close(connection)
    return seen.get(timeout=PATIENCE_S)


def break_off_by_app(world: World, app: App) -> bytes | None:
    """The same from the other end; what the client then reads, None for a reset."""

    def break_off(sock: socket.socket) -> None:
        sock.recv(100)
        reset_on_close(sock)
        sock.close()  # before the server shuts it down, which would send FIN first

    app.behave = break_off
    with connected(world) as connection:
        connection.sendall(b"hello")
        try:
            return read_to_the_end(connection)
        except SSL.SysCallError:
            return None


def line(process: Process, wanted: Callable[[Record], bool]) -> Record:
    """The access-log line that is `wanted`."""
    return process.wait_for(
        lambda record: record.get("logger") == ACCESS_LOGGER and wanted(record), PATIENCE_S
    )


def of_tunnel(record: Record) -> bool:
    return "sni" in record or "tunnel.target" in record


def of_mtls_end(record: Record) -> bool:
    return not of_tunnel(record)


@both_ends
def test_the_clients_reset_reaches_the_app(world: World, app: App) -> None:
    assert break_off_by_client(world, app) is None
    for process in (world.hgate, world.krun):
        assert line(process, of_tunnel)["flags"] == "DOWNSTREAM_RESET"


@both_ends
def test_a_peer_that_breaks_off_was_let_in_all_the_same(world: World, app: App) -> None:
    break_off_by_client(world, app)
    record = line(world.krun, of_mtls_end)
    assert (record["message"], record.get("identity")) == ("connection complete", str(CALLER))


@both_ends
def test_the_apps_reset_reaches_the_client(world: World, app: App) -> None:
    assert break_off_by_app(world, app) is None
    for process in (world.hgate, world.krun):
        assert line(process, of_tunnel)["flags"] == "UPSTREAM_RESET"
    record = line(world.krun, of_mtls_end)
    assert (record["message"], record["flags"]) == ("connection complete", "UPSTREAM_RESET")
