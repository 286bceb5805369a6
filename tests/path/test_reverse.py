"""Workloads that cannot be dialled: the whole path over connections that krun has made, and their ends.

openssl s_client, or another TLS client → hgate ← krun (which listens nowhere) → Envoy or built-in → app
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGTERM

import pytest
from OpenSSL import SSL

from hbone.demo.mesh import HOST, SNI
from shared.credentials.certificates.authority import KeyPair
from shared.credentials.certificates.certificate_writer import Contents, write
from tests.path.app import App, give_back, lasting
from tests.path.programs import MUCH_BYTES, s_client_brings_back
from tests.path.reverse_world import (
    OTHER,
    ReverseWorld,
    ends,
    registered,
    send,
)
from tests.path.tls_client import another_serial, connected, says_back, serial_of
from tests.support.cut_line import CutLine, line_to
from tests.support.revocation import put, revocation_list, serial
from tests.support.tls_client import read_to_the_end
from tests.support.world import INBOUNDS, PATIENCE_S, WORKLOAD, count, times


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ReverseWorld]:
    with ExitStack() as block:
        yield ReverseWorld(tmp_path, block)


@pytest.fixture
def app() -> Iterator[App]:
    with App(lasting(b"only one\n")) as app:
        yield app


def greeting(mesh: ReverseWorld) -> bytes:
    """The app's, over a connection that is ended in order."""
    with connected(mesh) as connection:
        words = connection.recv(100)
        connection.shutdown()
        assert read_to_the_end(connection) == b""
    return words


@pytest.mark.parametrize("inbound", INBOUNDS)
def test_64_mib_there_and_back(mesh: ReverseWorld, app: App, inbound: str, tmp_path: Path) -> None:
    app.behave = give_back(MUCH_BYTES)
    mesh.hgate()
    registered(mesh.krun(app.address, inbound=inbound))
    s_client_brings_back(mesh, tmp_path)


def test_it_dials_until_the_gateway_is_there(mesh: ReverseWorld, app: App) -> None:
    krun = mesh.krun(app.address)
    count(krun, f"register {HOST} with ", 2)
    mesh.hgate()
    assert greeting(mesh) == b"only one\n"


def test_a_client_that_nobody_waits_for_is_told(mesh: ReverseWorld) -> None:
    hgate = mesh.hgate(wait=0)
    with pytest.raises(SSL.Error, match="internal error"), connected(mesh):
        pass
    line = hgate.wait_for(lambda record: record.get("message") == "connection refused", PATIENCE_S)
    assert (line["flags"], line["sni"]) == ("CONNECT", SNI)
    assert line["error"] == f"reverse {HOST}: no workload has registered it"


def test_a_wrong_identity_is_refused_and_told(mesh: ReverseWorld, app: App) -> None:
    hgate = mesh.hgate()
    krun = mesh.krun(app.address, identity=OTHER)
    why = f"peer {OTHER} may not register {HOST}: no rule allows it"
    count(krun, f"register {HOST} with {mesh.reverse}: the gateway refuses it: {why}", 1)
    line = hgate.wait_for(lambda record: record.get("flags") == "DENY", PATIENCE_S)
    assert (line["identity"], line["error"]) == (str(OTHER), why)


def test_a_tunnels_line_says_who_carried_it(mesh: ReverseWorld, app: App) -> None:
    hgate = mesh.hgate()
    registered(mesh.krun(app.address))
    greeting(mesh)
    workload = hgate.wait_for(lambda record: record.get("message") == "workload registered", PATIENCE_S)
    line = hgate.wait_for(lambda record: record.get("message") == "connection complete", PATIENCE_S)
    assert line["origin"] == f"reverse://{HOST}/_hbone/15003"
    assert line["dst.addr"] == workload["src.addr"]
    assert (line["status"], line["flags"]) == (200, "-")


def test_instances_take_turns_and_one_of_them_may_die(mesh: ReverseWorld) -> None:
    mesh.hgate()
    with ExitStack() as block:
        one, two = (block.enter_context(App(lasting(words))) for words in (b"one\n", b"two\n"))
        first, second = mesh.krun(one.address), mesh.krun(two.address)
        registered(first)
        registered(second)
        assert {greeting(mesh) for _ in range(4)} == {b"one\n", b"two\n"}
        send(first, SIGKILL)
        assert {greeting(mesh) for _ in range(4)} == {b"two\n"}


def test_a_killed_workload_breaks_its_tunnels(mesh: ReverseWorld, app: App) -> None:
    mesh.hgate()
    krun = mesh.krun(app.address)
    registered(krun)
    with connected(mesh) as connection:
        assert connection.recv(100) == b"only one\n"
        send(krun, SIGKILL)
        with pytest.raises((SSL.SysCallError, ConnectionResetError)):
            connection.recv(100)


def test_a_reload_takes_a_name_away_and_gives_it_back(mesh: ReverseWorld, app: App) -> None:
    hgate = mesh.hgate()
    krun = mesh.krun(app.address)
    registered(krun)
    with connected(mesh) as connection:
        assert connection.recv(100) == b"only one\n"
        mesh.configure(rules=[])
        send(hgate, SIGHUP)
        count(krun, f"register {HOST} with {mesh.reverse}: ", 1)
        says_back(connection, b"still here\n")
        mesh.configure()
        send(hgate, SIGHUP)
        registered(krun, 2)
        says_back(connection, b"and still\n")
    assert greeting(mesh) == b"only one\n"


# Half-open.


@pytest.fixture
def line(mesh: ReverseWorld) -> Iterator[CutLine]:
    with line_to(mesh.reverse) as line:
        yield line


def test_a_path_that_was_forgotten_is_noticed_at_both_ends(
    mesh: ReverseWorld, app: App, line: CutLine
) -> None:
    hgate = mesh.hgate()
    krun = mesh.krun(app.address, gateway=line.address)
    registered(krun)
    assert greeting(mesh) == b"only one\n"
    line.cut()
    registered(krun, 2)
    hgate.wait_for(lambda record: "has not answered PING" in str(record.get("error")), PATIENCE_S)
    count(krun, f"registration of {HOST} with {line.address} lost: ", 1)
    assert greeting(mesh) == b"only one\n"


# Drain and restart.


def test_hgate_restarts_and_workloads_come_back(mesh: ReverseWorld, app: App) -> None:
    krun = mesh.krun(app.address)
    for number in (1, 2, 3):
        hgate = mesh.hgate()
        registered(krun, number)
        assert greeting(mesh) == b"only one\n"
        send(hgate, SIGTERM)
        ends(hgate)


def test_hgate_is_killed_and_workloads_come_back(mesh: ReverseWorld, app: App) -> None:
    hgate = mesh.hgate()
    krun = mesh.krun(app.address)
    registered(krun)
    send(hgate, SIGKILL)
    count(krun, f"registration of {HOST} with {mesh.reverse} lost: ", 1)
    mesh.hgate()
    assert greeting(mesh) == b"only one\n"


def test_a_tunnel_outlives_the_handover_to_a_successor(mesh: ReverseWorld, app: App) -> None:
    old = mesh.hgate()
    krun = mesh.krun(app.address)
    registered(krun)
    with connected(mesh) as connection:
        assert connection.recv(100) == b"only one\n"
        mesh.hgate()
        send(old, SIGTERM)
        registered(krun, 2)
        says_back(connection, b"still here\n")
        assert greeting(mesh) == b"only one\n"
        says_back(connection, b"and still\n")
        connection.shutdown()
        assert read_to_the_end(connection) == b""
    ends(old)


def test_a_tunnel_outlives_the_drain_of_its_workload(mesh: ReverseWorld) -> None:
    mesh.hgate()
    with ExitStack() as block:
        one, two = (block.enter_context(App(lasting(words))) for words in (b"one\n", b"two\n"))
        first = mesh.krun(one.address)
        registered(first)
        with connected(mesh) as connection:
            assert connection.recv(100) == b"one\n"
            registered(mesh.krun(two.address))
            send(first, SIGTERM)
            count(first, "draining: ", 1)
            assert {greeting(mesh) for _ in range(4)} == {b"two\n"}
            says_back(connection, b"still here\n")
            connection.shutdown()
            assert read_to_the_end(connection) == b""
        ends(first)


# Certificates.


def test_a_new_certificate_is_shown_at_the_next_dial(mesh: ReverseWorld, app: App) -> None:
    folder, crl = mesh.folder / "turned", mesh.folder / "crl.pem"
    old, new = (mesh.mesh.issue(WORKLOAD, dns_names=(SNI, HOST)) for _ in range(2))
    put(crl, revocation_list(mesh.mesh))
    turn(mesh, folder, old)
    mesh.hgate(crl=str(crl))
    krun = mesh.krun(app.address, environ={"HBONE_CERTS": str(folder)})
    registered(krun)
    with connected(mesh) as connection:
        assert connection.recv(100) == b"only one\n"
        assert serial_of(connection) == serial(old)
        turn(mesh, folder, new)
        served = another_serial(mesh, [serial(old)], b"only one\n")  # once krun has looked at its files
        assert served == serial(new)
        says_back(connection, b"as before\n")
        assert times(krun, f"registered {HOST} with ") == 1, "an open registration stays"
        connection.shutdown()
        assert read_to_the_end(connection) == b""
    # Only with the new certificate it gets in again.
    put(crl, revocation_list(mesh.mesh, serial(old)))
    registered(krun, 2)
    assert greeting(mesh) == b"only one\n"


def turn(mesh: ReverseWorld, folder: Path, pair: KeyPair) -> None:
    """Replaces the files in `folder` as krun does it itself."""
    write(folder, Contents(pair.certificate_pem, pair.key_pem, mesh.mesh.root_pem))


# Workers.


def test_with_several_workers_each_is_registered_with(mesh: ReverseWorld, app: App) -> None:
    mesh.hgate("--workers", "3", wait=0)
    krun = mesh.krun(app.address)
    registered(krun, 3)
    with ExitStack() as block:
        # Whichever worker the kernel deals a client to.
        for connection in [block.enter_context(connected(mesh)) for _ in range(20)]:
            assert connection.recv(100) == b"only one\n"
