"""Rules in the kernel, by the real iptables of either kind, in a network of the test's own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from agent.capture.capture import Capture
from agent.capture.iptables import Iptables, printed
from agent.config.capture_settings import CaptureSettings
from agent.config.settings import from_env
from shared.errors import UnavailableError
from shared.tasks import spawn
from tests.support.captured_network import CapturedNetwork, captured_network
from tests.support.other_user import root_only
from tests.support.tcp_peer import TcpServer

pytestmark = root_only

PATH = os.environ["PATH"]
T = TypeVar("T")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[CapturedNetwork]:
    groups = os.getgroups()
    try:
        with captured_network(tmp_path) as net:
            yield net
    finally:
        # While rules may be left, the group stays as it is: later tests want their own.
        ctypes.CDLL(None).setfsgid(os.getegid())
        os.setgroups(groups)


def settings(**environ: str) -> CaptureSettings:
    return from_env(environ).capture


def run(work: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(work)


@pytest.fixture(params=["iptables-nft", "iptables-legacy"])
def iptables(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iptables:
    """Of a container that has one kind of iptables only."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr("agent.capture.iptables.SYSTEM_PATH", "")
    kind: str = request.param
    for family in ("iptables", "ip6tables"):
        for end in ("-restore", "-save"):
            program = shutil.which(kind.replace("iptables", family) + end)
            if program is None:
                pytest.skip(f"there is no {kind}")
            (folder / f"{family}{end}").symlink_to(program)
    return Iptables(str(folder))


def test_what_is_captured(net: CapturedNetwork, iptables: Iptables) -> None:
    told = settings(
        OUTBOUND_IP_RANGES_INCLUDE="10.0.0.0/8,fd00::/8",
        OUTBOUND_IP_RANGES_EXCLUDE="10.9.0.0/16",
        OUTBOUND_PORTS_INCLUDE="9000",
    )
    assert run(iptables.apply(None, told)) == "krun"
    assert net.ask("10.1.2.3") == "captured 10.1.2.3:80"
    assert net.ask("fd99::1") == "captured [fd99::1]:80"
    assert net.ask("203.0.113.7", 9000) == "captured 203.0.113.7:9000"
    for host, port in (
        ("203.0.113.7", 80),
        ("10.9.1.1", 80),
        ("10.1.2.3", 15008),
        ("10.1.2.3", 15009),
        ("169.254.169.254", 80),
        ("169.254.169.254", 9000),
    ):
        assert net.ask(host, port) == "world", (host, port)
    assert net.ask("10.1.2.3", user=1337) == "world"
    assert net.ask("10.1.2.3", group=1337) == "world"
    assert net.ask("10.1.2.3", user=65534, group=65534) == "captured 10.1.2.3:80"
    assert net.ask("10.55.0.53", 53, kind="SOCK_DGRAM") == "world"
    assert "refused" in net.ask("10.55.0.1"), "an address of this machine's own"
    assert net.ask("127.0.0.1", 15053) == "dns"


def test_all_addresses_and_names(net: CapturedNetwork, iptables: Iptables) -> None:
    run(iptables.apply(None, settings(OUTBOUND_IP_RANGES_INCLUDE="*", ISTIO_META_DNS_CAPTURE="true")))
    assert net.ask("203.0.113.7") == "captured 203.0.113.7:80"
    assert net.ask("fd99::1") == "captured [fd99::1]:80"
    assert net.ask("169.254.169.254") == "world"
    for kind in ("SOCK_DGRAM", "SOCK_STREAM"):
        assert net.ask("10.55.0.53", 53, kind=kind) == "dns"
        assert net.ask("10.55.0.53", 53, kind=kind, user=1337) == "world"


def test_again_and_again(net: CapturedNetwork, iptables: Iptables) -> None:
    run(iptables.apply(None, settings()))
    once = run(iptables.found())
    assert once == ["KRUN_OUTPUT", "KRUN_REDIRECT"]
    before = printed(iptables.own_rules(settings()))
    run(iptables.apply(None, settings()))
    run(iptables.apply(None, settings(OUTBOUND_IP_RANGES_INCLUDE="203.0.113.0/24")))
    assert run(iptables.found()) == once
    assert net.ask("203.0.113.7") == "captured 203.0.113.7:80"
    assert net.ask("10.1.2.3") == "world", "as it was before"
    assert run(iptables.remove()) == 2
    assert run(iptables.remove()) == 0
    assert net.ask("203.0.113.7") == "world"
    assert before.startswith("# iptables-restore --noflush --wait 5\n*nat\n")


def test_both_kinds_are_looked_at(net: CapturedNetwork) -> None:
    """Of an image with both: rules of the one are invisible to the other."""
    if not all(shutil.which(f"iptables-{kind}") for kind in ("nft", "legacy")):
        pytest.skip("there is one kind only")
    for kind in ("nft", "legacy"):
        for rule in ("-N ISTIO_OUTPUT", "-A OUTPUT -j ISTIO_OUTPUT"):
            assert os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"iptables-{kind} -t nat {rule}") == 0
    assert run(Iptables(PATH).remove()) == 2
    assert (net.rules("iptables-nft"), net.rules("iptables-legacy")) == ([], [])


def test_rules_of_others_stay(net: CapturedNetwork) -> None:
    assert (
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", "iptables -t nat -A OUTPUT -p tcp --dport 7 -j RETURN") == 0
    )
    run(Iptables(PATH).apply(None, settings()))
    assert len(net.rules()) > 5
    run(Iptables(PATH).remove())
    assert net.rules() == ["-A OUTPUT -p tcp -m tcp --dport 7 -j RETURN"]


def test_what_iptables_refuses_leaves_nothing(net: CapturedNetwork, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    for name in ("iptables-restore", "iptables-save", "ip6tables-save"):
        (folder / name).symlink_to(shutil.which(name) or "")
    (folder / "ip6tables-restore").write_text("#!/bin/sh\necho 'no such table' >&2; exit 3\n")
    (folder / "ip6tables-restore").chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("agent.capture.iptables.SYSTEM_PATH", "/bin")
        patched.setattr("agent.capture.iptables.VARIANTS", ("",))
        half = Iptables(str(folder))
        with pytest.raises(UnavailableError, match=r"captured: ip6tables-restore: no such table$"):
            run(half.apply(None, settings(OUTBOUND_IP_RANGES_INCLUDE="*")))
    assert net.rules() == []


def test_a_program_that_hangs(net: CapturedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "pilot-agent"
    hanging.write_text("#!/bin/sh\nexec sleep 100\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("agent.capture.iptables.TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match=r"pilot-agent has not ended within 0.2 s"):
        run(Iptables(PATH).apply_istio(hanging, settings()))


def test_a_program_s_own_programs_end_with_it(
    net: CapturedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pilot-agent's iptables-restore, which waits for the lock."""
    pid = tmp_path / "pid"
    parent = tmp_path / "pilot-agent"
    parent.write_text(f"#!/bin/sh\nsleep 100 >/dev/null 2>&1 &\necho $! >{pid}\nwait\n")
    parent.chmod(0o755)
    monkeypatch.setattr("agent.capture.iptables.TIMEOUT_S", 0.5)
    with pytest.raises(UnavailableError, match=r"pilot-agent has not ended within 0.5 s"):
        run(Iptables(PATH).apply_istio(parent, settings()))
    status = Path(f"/proc/{pid.read_text().strip()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


# Istio's own.


@pytest.fixture
def pilot_agent() -> Path:
    """The real one, where `make mesh` has built it."""
    home = pwd.getpwuid(os.getuid()).pw_dir  # tests have another
    for found in Path(os.environ.get("HBONE_TEST_CACHE", f"{home}/.cache/hbone-tests")).glob(
        "istio-*/pilot-agent"
    ):
        return found
    pytest.skip("no pilot-agent: `make mesh` builds it")


def test_pilot_agent_s_rules(net: CapturedNetwork, pilot_agent: Path) -> None:
    iptables = Iptables(PATH)
    told = settings(
        OUTBOUND_IP_RANGES_INCLUDE="10.0.0.0/8,fd00::/8",
        OUTBOUND_IP_RANGES_EXCLUDE="10.9.0.0/16",
        OUTBOUND_PORTS_INCLUDE="9000",
        ISTIO_META_DNS_CAPTURE="true",
    )
    for _ in range(2):
        assert run(iptables.apply(pilot_agent, told)) == "pilot-agent"
        assert "ISTIO_OUTPUT" in run(iptables.found())
        assert net.ask("10.1.2.3") == "captured 10.1.2.3:80"
        assert net.ask("fd99::1") == "captured [fd99::1]:80"
        assert net.ask("203.0.113.7", 9000) == "captured 203.0.113.7:9000"
        assert net.ask("10.55.0.53", 53, kind="SOCK_DGRAM") == "dns"
        assert net.ask("10.1.2.3", group=1337) == "world"
        assert net.ask("10.9.1.1") == "world"
        assert net.ask("10.1.2.3", 15008) == "world"
    # With other settings, as after a change of mesh-env.
    assert (
        run(iptables.apply(pilot_agent, settings(OUTBOUND_IP_RANGES_INCLUDE="203.0.113.0/24")))
        == "pilot-agent"
    )
    assert net.ask("203.0.113.7") == "captured 203.0.113.7:80"
    assert net.ask("10.1.2.3") == "world"
    assert run(iptables.remove()) > 0
    assert (run(iptables.found()), net.ask("203.0.113.7")) == ([], "world")


def test_where_pilot_agent_s_command_fails_the_rules_are_ours(
    net: CapturedNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hbone.capture")
    failing = tmp_path / "pilot-agent"
    failing.write_text("#!/bin/sh\nprintf '2026\\terror\\tno valid local IP address found\\n'; exit 1\n")
    failing.chmod(0o755)
    assert run(Iptables(PATH).apply(failing, settings())) == "krun"
    assert "krun's own, for pilot-agent istio-iptables: no valid local IP address found" in caplog.text
    assert net.ask("10.1.2.3") == "captured 10.1.2.3:80"


# What krun makes of it.


def capture(path: str | None = PATH, **environ: str) -> Capture:
    return Capture(settings(**environ), path)


FAILING = Path("/bin/false")
"""A pilot-agent that knows no istio-iptables."""


def test_krun_s_own_traffic_is_not_captured_and_its_app_s_is(net: CapturedNetwork) -> None:
    async def story() -> None:
        it = capture()
        await it.start("pilot-agent", FAILING)
        assert it.mode == "iptables"
        reader, writer = await asyncio.open_connection("10.1.2.3", 80)
        assert await reader.read() == b"world"
        writer.close()
        assert net.ask("10.1.2.3") == "captured 10.1.2.3:80", "a program that krun has started"
        await it.close()
        assert net.rules() == []
        assert os.getegid() == 0

    run(story())


def test_a_start_that_is_broken_off_leaves_no_rules(net: CapturedNetwork, tmp_path: Path) -> None:
    async def story() -> None:
        async with TcpServer.listening() as there:
            slow = tmp_path / "pilot-agent"
            slow.write_text(
                "#!/bin/bash\niptables -t nat -N ISTIO_OUTPUT\n"
                f"exec 3<>/dev/tcp/127.0.0.1/{there.port}\nexec sleep 100\n"
            )
            slow.chmod(0o755)
            it = capture()
            start = spawn(it.start("pilot-agent", slow), name="start")
            await there.accept()
            start.cancel()
            await asyncio.wait({start})
            await it.close()

    run(story())
    assert net.rules() == []


def test_what_is_chosen_and_why(net: CapturedNetwork, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hbone.capture")

    def chosen(it: Capture, pilot_agent: Path | None = FAILING) -> str:
        run(it.start("pilot-agent" if pilot_agent else "builtin", pilot_agent))
        run(it.close())
        assert net.rules() == []
        return caplog.messages[-1]

    assert chosen(capture()) == "outbound traffic: iptables (10.0.0.0/8, by krun)"
    assert chosen(capture(HBONE_CAPTURE="none")) == "outbound traffic: none (HBONE_CAPTURE=none)"
    assert chosen(capture(HBONE_CAPTURE="proxy")) == "outbound traffic: proxy (HBONE_CAPTURE=proxy)"
    assert chosen(capture(), None) == "outbound traffic: none (the mTLS end is builtin)"
    with pytest.raises(UnavailableError, match="HBONE_CAPTURE=iptables: the mTLS end is builtin, and only"):
        chosen(capture(HBONE_CAPTURE="iptables"), None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("agent.capture.iptables.SYSTEM_PATH", "")
        why = "there is no iptables-restore with iptables-save"
        assert chosen(capture(path="")) == f"outbound traffic: proxy ({why})"
        with pytest.raises(UnavailableError, match=f"HBONE_CAPTURE=iptables: {why}: set HBONE_CAPTURE=proxy"):
            chosen(capture(path="", HBONE_CAPTURE="iptables"))
        services = capture(path="", HBONE_SERVICES="127.0.0.1:15005")
        assert chosen(services) == f"outbound traffic: none ({why}, and HTTP_PROXY is for HBONE_SERVICES)"
        egress = Capture(settings(), "", proxy_taken_by="HBONE_EGRESS_APP_PROXY")
        assert chosen(egress).endswith("and HTTP_PROXY is for HBONE_EGRESS_APP_PROXY)")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 65532)
        assert chosen(capture()) == "outbound traffic: proxy (krun is not root)"


@pytest.fixture
def locked(net: CapturedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], str]:
    """A PATH whose iptables-restore adds rules and then fails; it removes none while `locked(True)`."""
    folder, lock = tmp_path / "locked", tmp_path / "lock"
    folder.mkdir()
    for name in ("iptables-restore", "iptables-save"):
        real = shutil.which(name)
        (folder / name).write_text(
            f"""#!/bin/sh
[ {name} = iptables-save ] && exec {real} "$@"
rules=$(cat)
if echo "$rules" | grep -q ^-X; then
    [ -e {lock} ] && echo "Another app is currently holding the xtables lock" >&2 && exit 4
    echo "$rules" | exec {real} "$@"
fi
echo "$rules" | {real} "$@"
echo "no such target" >&2
exit 2
"""
        )
        (folder / name).chmod(0o755)
    monkeypatch.setattr("agent.capture.iptables.SYSTEM_PATH", "/bin")
    monkeypatch.setattr("agent.capture.iptables.VARIANTS", ("",))

    def path(is_locked: bool) -> str:
        lock.touch() if is_locked else lock.unlink()
        return f"{folder}:/usr/bin:/bin"

    return path


def test_rules_that_cannot_be_removed_end_the_start_and_are_removed_at_the_end(
    net: CapturedNetwork, locked: Callable[[bool], str]
) -> None:
    async def story() -> None:
        it = capture(locked(True))
        with pytest.raises(UnavailableError, match=r"rules cannot be removed: .* xtables lock$"):
            await it.start("pilot-agent", FAILING)
        assert net.rules() != []
        reader, writer = await asyncio.open_connection("10.1.2.3", 80)
        assert await reader.read() == b"world", "krun's own traffic, while rules are left"
        writer.close()
        locked(False)
        await it.close()
        assert net.rules() == []

    run(story())


def test_the_end_waits_no_longer_than_it_may(
    net: CapturedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        it = capture()
        await it.start("pilot-agent", FAILING)
        stuck = tmp_path / "stuck"
        stuck.mkdir()
        for name in ("iptables-save", "iptables-restore"):
            (stuck / name).write_text("#!/bin/sh\nexec sleep 100\n")
            (stuck / name).chmod(0o755)
        monkeypatch.setattr(it, "_iptables", Iptables(f"{stuck}:{PATH}"))
        await it.close(0.2)

    run(story())
    assert caplog.messages == ["rules are not removed within 0.2 s; `krun capture remove` tries again"]


def test_programs_that_are_started_trust_their_environment(net: CapturedNetwork) -> None:
    """With AT_SECURE (getauxval(3), 23) they would ignore LD_LIBRARY_PATH and SSL_CERT_FILE."""
    os.setgroups(())
    ask = [sys.executable, "-c", "import ctypes; print(ctypes.CDLL(None).getauxval(23))"]

    async def story() -> bytes:
        it = capture()
        await it.start("pilot-agent", FAILING)
        assert it.mode == "iptables"
        process = await asyncio.create_subprocess_exec(*ask, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        await it.close()
        return output

    assert run(story()) == b"0\n"


def test_cores_are_as_before(net: CapturedNetwork) -> None:
    """The kernel forbids them with a change of the group."""
    libc = ctypes.CDLL(None)

    async def story() -> list[int]:
        told = []
        for dumpable in (1, 0):
            libc.prctl(4, dumpable, 0, 0, 0)
            it = capture()
            await it.start("pilot-agent", FAILING)
            told.append(libc.prctl(3, 0, 0, 0, 0))
            await it.close()
            told.append(libc.prctl(3, 0, 0, 0, 0))
        return told

    before = libc.prctl(3, 0, 0, 0, 0)
    try:
        assert run(story()) == [1, 1, 0, 0]
    finally:
        libc.prctl(4, before, 0, 0, 0)


def test_where_krun_would_capture_itself_nothing_is_captured(
    net: CapturedNetwork, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without SETGID."""
    caplog.set_level("INFO", "hbone.capture")
    monkeypatch.setattr("agent.capture.capture._set_group", lambda group: False)
    it = capture()
    run(it.start("pilot-agent", FAILING))
    assert (it.mode, net.rules()) == ("proxy", [])
    assert "krun may not change its group (SETGID)" in caplog.messages[-1]
    it = capture(HBONE_CAPTURE="iptables")
    with pytest.raises(UnavailableError, match=r"HBONE_CAPTURE=iptables: krun may not change its group"):
        run(it.start("pilot-agent", FAILING))
    run(it.close())
