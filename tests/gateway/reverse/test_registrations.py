"""A workload's registration: how it comes about, why not, and how it ends; real mTLS throughout."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.config.reverse_settings import ReverseSettings
from gateway.rules.reverse_rules import ReverseRule
from shared.credentials.certificates.authority import Authority
from shared.errors import DialError, ExpelledError, StreamResetError
from shared.trust.peer_patterns import TrustDomain
from shared.trust.spiffe import SpiffeId
from shared.tunnel.registration import ALREADY_REGISTERED
from tests.support import reverse_port
from tests.support.hbone_port import TRUST_DOMAIN, Mesh
from tests.support.reverse_port import NAME, WORKLOAD, ReversePort
from tests.support.revocation import Hierarchy, end_in, put, revocation_list, serial_in
from tests.support.tcp_peer import PATIENCE_S
from tests.support.wall_clock import Clock

OTHER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "other")
ANYBODY = ReverseRule(("*",), ("*.demo.svc.cluster.local",))


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[ReversePort]:
    async with reverse_port.serving(tmp_path, wait_s=0.0) as port:
        yield port


# Registered.


async def test_a_workload_gets_its_name_once_it_has_answered(port: ReversePort) -> None:
    async with port.dialled() as workload:
        stream, verdict = await workload.verdict()
        assert (verdict.refusal, verdict.workers) == (None, 1)
        assert port.value("hbone_reverse_connections") == 1
        assert port.value("hbone_reverse_workloads") == 0, "it may not even speak HTTP/2"
        stream.respond(204, end=True)
        line = await port.line()
        assert (line["severity"], line["message"]) == ("INFO", "workload registered")
        assert (line["src.addr"], line["sni"]) == (workload.address, NAME)
        assert (line["identity"], line["route"], line["flags"]) == (str(WORKLOAD), "reverse", "-")
        assert port.value("hbone_reverse_workloads") == 1
        assert port.value("hbone_reverse_names") == 1
        assert port.value("hbone_reverse_registrations_total") == 1
    line = await port.line()
    assert (line["sni"], line["flags"]) == (NAME, "UPSTREAM_RESET")
    assert port.value("hbone_reverse_workloads") == 0


async def test_the_name_is_the_same_in_capitals(port: ReversePort) -> None:
    async with port.dialled(NAME.upper()) as workload:
        await workload.registered()
        assert (await port.line())["sni"] == NAME


async def test_who_is_there_already_leaves_without_a_line(port: ReversePort) -> None:
    async with port.dialled() as workload:
        stream, _ = await workload.verdict()
        stream.respond(ALREADY_REGISTERED, end=True)
        await workload.peer.until(lambda: workload.peer.lost)
        assert workload.peer.goaway
    async with port.workload():  # whose line is the next one
        pass


# Not registered.


async def refused(port: ReversePort, workload: reverse_port.Workload) -> str:
    """Holds that a workload is told why not; the reason that it hears and that the log has."""
    stream, verdict = await workload.verdict()
    stream.respond(204, end=True)
    await workload.peer.until(lambda: workload.peer.lost)
    assert workload.peer.goaway
    line = await port.line()
    assert (line["message"], line["error"]) == ("connection refused", verdict.refusal)
    assert port.value("hbone_connections_refused_total", flags=line["flags"]) == 1
    assert port.value("hbone_reverse_workloads") == 0
    return f"{line['flags']}: {line['error']}"


async def test_another_ones_name(port: ReversePort) -> None:
    async with port.dialled(identity=OTHER) as workload:
        assert await refused(port, workload) == (
            f"DENY: peer {OTHER} may not register {NAME}: no rule allows it"
        )


async def test_a_rule_that_denies(tmp_path: Path) -> None:
    deny = ReverseRule(("*",), (NAME,), deny=True)
    async with reverse_port.serving(tmp_path, deny, ANYBODY) as port, port.dialled() as workload:
        assert "rules[0] denies it" in await refused(port, workload)


@pytest.mark.parametrize("name", ["hello.elsewhere.example", "", "10.0.0.1"])
async def test_a_name_that_nobody_may_have_ends_the_handshake(port: ReversePort, name: str) -> None:
    tls = port.mesh.tls(port.mesh.member(WORKLOAD))
    with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
        await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname=name)
    line = await port.line()
    assert (line["flags"], line["route"]) == ("TLS_FAILURE", "reverse")


async def test_a_foreign_authority(port: ReversePort, tmp_path: Path) -> None:
    other = Authority.create(TRUST_DOMAIN)
    other.write(tmp_path / "other", other.issue(WORKLOAD))
    async with port.dialled(tls=port.mesh.tls(tmp_path / "other")) as workload:
        await workload.peer.until(lambda: workload.peer.lost)
    line = await port.line()
    assert line["flags"] == "TLS_FAILURE"
    assert "client certificate refused" in line["error"]


async def test_a_workload_that_never_answers(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path, handshake_timeout_s=0.2) as port, port.dialled() as workload:
        await workload.verdict()
        await workload.peer.until(lambda: workload.peer.lost)
        line = await port.line()
        assert (line["flags"], line["error"]) == ("UPSTREAM", "no response headers within 0.2 s")


async def test_a_workload_that_answers_something_else(port: ReversePort) -> None:
    async with port.dialled() as workload:
        stream, _ = await workload.verdict()
        stream.respond(404, end=True)
        assert (await port.line())["error"] == f"register {NAME}: the workload answered 404"
        await workload.peer.until(lambda: workload.peer.lost)


async def test_who_comes_while_we_leave(port: ReversePort) -> None:
    async with port.dialled() as workload:
        stream, _ = await workload.verdict()
        await port.listener.leave()
        stream.respond(204, end=True)
        line = await port.line()
        assert (line["flags"], line["error"]) == ("STOPPED", "the gateway stops")
        await workload.peer.until(lambda: workload.peer.lost)
        assert workload.peer.goaway


# The end of a registration.


async def test_goaway_of_a_workload_loses_the_name_and_no_tunnel(port: ReversePort) -> None:
    async with port.workload() as workload:
        stream, request = await port.opened(workload)
        workload.peer.say_goaway(request.number)
        await workload.peer.answered()
        assert port.value("hbone_reverse_workloads") == 0
        stream.write(b"still here")
        assert await request.read(10) == b"still here"
        stream.abort()
        await workload.peer.until(lambda: workload.peer.lost)
    line = await port.line()
    assert (line["message"], line["flags"]) == ("connection complete", "-")
    assert "error" not in line


async def test_a_silent_workload_is_noticed(tmp_path: Path) -> None:
    """Half-open: TCP is there as far as we know, and nobody at the other end."""
    async with reverse_port.serving(tmp_path, keepalive_s=0.1) as port, port.workload() as workload:
        workload.peer.pause()
        line = await port.line()
        assert line["flags"] == "UPSTREAM_RESET"
        assert line["error"] == (f"registration lost: {workload.address} has not answered PING within 0.1 s")
        assert port.value("hbone_reverse_workloads") == 0


async def test_an_idle_workload_that_answers_stays(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path, keepalive_s=0.05) as port, port.workload() as workload:
        await workload.peer.until(lambda: workload.peer.pings >= 5)
        assert port.value("hbone_reverse_workloads") == 1


async def test_new_rules_let_go_of_those_whom_they_refuse(port: ReversePort) -> None:
    async with port.workload() as workload, port.workload("other.demo.svc.cluster.local", OTHER):
        stream, request = await port.opened(workload)
        rule = ReverseRule((str(OTHER),), ("*.demo.svc.cluster.local",))
        port.listener.apply(ReverseSettings(rules=(rule,)))
        assert port.value("hbone_reverse_workloads") == 1
        stream.write(b"still here")
        assert await request.read(10) == b"still here"
        assert workload.peer.goaway
        stream.abort()
        await workload.peer.until(lambda: workload.peer.lost)
        assert (await port.line())["flags"] == "-"


async def test_a_certificate_that_ends_costs_the_name_and_no_tunnel(tmp_path: Path, clock: Clock) -> None:
    async with reverse_port.serving(tmp_path, wall_clock=clock, wait_s=0.0) as port:
        member = port.mesh.member(WORKLOAD)
        clock.now = end_in(member) - 0.1
        async with port.dialled(tls=port.mesh.tls(member)) as workload:
            await workload.registered()
            assert (await port.line())["message"] == "workload registered"
            stream, request = await port.opened(workload)
            clock.turn(0.2)
            await workload.peer.until(lambda: workload.peer.goaway)
            assert port.value("hbone_reverse_workloads") == 0
            with pytest.raises(DialError, match="no workload has registered it"):
                await port.open()
            stream.write(b"still here")
            stream.write_eof()
            assert await request.rest() == b"still here"
            request.end()
            await workload.peer.until(lambda: workload.peer.lost)
        line = await port.line()
        assert (line["message"], line["flags"]) == ("connection complete", "-")


async def test_after_the_drain_timeout_its_tunnels_are_broken_off(tmp_path: Path, clock: Clock) -> None:
    async with reverse_port.serving(tmp_path, wall_clock=clock, drain_timeout_s=0.05) as port:
        member = port.mesh.member(WORKLOAD)
        clock.now = end_in(member) - 0.1
        async with port.dialled(tls=port.mesh.tls(member)) as workload:
            await workload.registered()
            assert (await port.line())["message"] == "workload registered"
            stream, request = await port.opened(workload)
            clock.turn(0.2)
            await request.broken()
            await workload.peer.until(lambda: workload.peer.lost)
            assert isinstance(stream._error, ExpelledError)
        line = await port.line()
        assert (line["message"], line["flags"]) == ("connection complete", "DENY")
        assert line["error"] == f"peer certificate denied: that of {WORKLOAD} has expired"


async def test_a_machine_that_slept_sends_no_client_to_an_expired_workload(
    tmp_path: Path, clock: Clock
) -> None:
    """Its timers have not noticed. Who has a good certificate gets the client."""
    async with (
        reverse_port.serving(tmp_path, wall_clock=clock, wait_s=PATIENCE_S) as port,
        port.workload() as old,
    ):
        clock.turn(30 * 86400)
        opening = port.open()
        await old.peer.until(lambda: old.peer.goaway)
        clock.turn(-30 * 86400)  # for the new one's certificate, which is as young
        async with port.dialled() as young:
            await young.registered()
            request = await young.request()
            request.respond(200)
            (await opening).abort()
        assert old.requests.empty()


# Certificates that are revoked.


async def test_a_workload_that_is_revoked_later_loses_its_name_and_its_tunnels(tmp_path: Path) -> None:
    mesh, crl = Mesh(tmp_path), tmp_path / "crl.pem"
    put(crl, revocation_list(mesh.authority))
    async with reverse_port.serving(tmp_path, mesh=mesh, crl=crl, wait_s=0.0) as port:
        watch = port.listener.revocations
        assert watch is not None
        async with port.workload("other.demo.svc.cluster.local", OTHER), port.workload() as workload:
            stream, _ = await port.opened(workload)
            gone: list[StreamResetError] = []
            stream.on_gone = gone.append
            put(crl, revocation_list(mesh.authority, serial_in(mesh.folder_of(WORKLOAD))))
            await watch.check_files()
            line = await port.line()
            assert (line["sni"], line["flags"]) == (NAME, "DENY")
            assert "it is revoked: serial number" in line["error"]
            assert [(type(error), error.flag) for error in gone] == [(ExpelledError, "DENY")]
            await workload.peer.until(lambda: workload.peer.lost)
            assert workload.peer.goaway
            assert port.value("hbone_reverse_workloads") == 1, "the other one"


async def test_a_revoked_workload_is_refused(tmp_path: Path) -> None:
    mesh, crl = Mesh(tmp_path), tmp_path / "crl.pem"
    put(crl, revocation_list(mesh.authority, serial_in(mesh.member(WORKLOAD))))
    async with reverse_port.serving(tmp_path, mesh=mesh, crl=crl) as port:
        async with port.dialled(tls=mesh.tls(mesh.folder_of(WORKLOAD))) as workload:
            await workload.peer.until(lambda: workload.peer.lost)
            assert workload.peer.goaway
        line = await port.line()
        assert (line["message"], line["flags"]) == ("connection refused", "DENY")
        assert "is revoked" in line["error"]


async def test_a_workload_of_an_alias_has_the_name_of_ours(tmp_path: Path) -> None:
    trust = TrustDomain(TRUST_DOMAIN, ("old.local",))
    old = SpiffeId("old.local", WORKLOAD.path)
    mesh = Mesh(tmp_path, authority=Hierarchy().root)  # which names no trust domain, as Istio's
    async with reverse_port.serving(tmp_path, mesh=mesh, trust=trust) as port, port.workload(identity=old):
        assert port.value("hbone_reverse_workloads") == 1
