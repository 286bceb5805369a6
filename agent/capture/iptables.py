"""Runs iptables: our own rules or Istio's, applied, looked for and removed, each within a deadline.

iptables-restore, and not iptables: it changes a table all at once or not at all. And not nft: Istio's images
have iptables, and gVisor knows its older interface only. There are two builds of it, for two interfaces of
the kernel. A rule of one is invisible to the other, so both are looked at where there are both; the one that
iptables-restore itself stands for is tried first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from agent.capture import rules
from agent.capture.rules import Rules
from agent.config.capture_settings import CaptureSettings
from agent.config.pilot_settings import UID
from shared import ports
from shared.errors import UnavailableError
from shared.tasks import spawn

log = logging.getLogger("hbone.capture")

VARIANTS = ("", "-legacy", "-nft")
"""Of the programs' names."""

SYSTEM_PATH = "/usr/sbin:/sbin"
"""Where they are, for users whose PATH lacks it."""

TIMEOUT_S = 10.0
"""For one program: it takes milliseconds, but another may hold the lock."""

KILL_S = 1.0
"""For the processes of a program that was killed: the kernel ends them after what they are at."""

WAIT_S = 5
"""For the lock."""

MAX_OUTPUT_BYTES = 4 << 20
"""Of a program: tens of thousands of rules."""

RESOLV_CONF = Path("/etc/resolv.conf")
MAX_FILE_BYTES = 64 << 10

INTERFACES = Path("/proc/net/if_inet6")
GLOBAL = "00"
"""The scope of addresses there, in the fourth column (net/ipv6/addrconf.c); 20 is the link's, 10 loopback."""

CAP_NET_ADMIN = 12
"""Its bit in /proc/PID/status (linux/capability.h)."""


class Iptables:
    """The programs on `search_path` (as PATH; None: none but the system's own folders)."""

    def __init__(self, search_path: str | None) -> None:
        self._path = ":".join(filter(None, (search_path, SYSTEM_PATH)))

    def lacking(self) -> str:
        """Why no rules can be applied here, as far as that can be seen; empty if nothing is in the way."""
        if os.geteuid() != 0:
            return "krun is not root"
        if not _has_net_admin():
            return "krun has no NET_ADMIN"
        if not self._variants("iptables"):
            return "there is no iptables-restore with iptables-save"
        return ""

    async def apply(self, pilot_agent: Path | None, settings: CaptureSettings) -> str:
        """Applies the rules that `settings` mean, in place of all that are there: by pilot-agent's command if
        there is one and it can, else our own. Returns whose they are. Raises UnavailableError; then there are
        none."""
        if pilot_agent is not None:
            try:
                await self.apply_istio(pilot_agent, settings)
                return "pilot-agent"
            except UnavailableError as error:
                log.info("rules of krun's own, for %s", error)
        await self.apply_own(self.own_rules(settings))
        return "krun"

    # Own rules.

    def own_rules(self, settings: CaptureSettings) -> Rules:
        """The minimal set, for this machine's name servers."""
        return rules.own_rules(settings, _name_servers())

    async def apply_own(self, wanted: Rules) -> None:
        """Applies rules of our own, in place of all that are there. Raises UnavailableError; then there are
        none."""
        await self.remove()
        for program, text in (("iptables", wanted.ipv4), ("ip6tables", wanted.ipv6)):
            if not text or (program == "ip6tables" and not _has_ipv6()):
                continue
            try:
                await self._restored(program, text)
            except BaseException:
                await self.remove()
                raise

    async def _restored(self, program: str, text: str) -> None:
        """By the first variant of a program that can do it."""
        told = f"there is no {program}-restore with {program}-save"
        for variant in self._variants(program):
            code, _, complaint = await self._run(*_restore(variant), text=text)
            if code == 0:
                return
            told = f"{variant}-restore: {complaint or f'exit code {code}'}"
            log.debug("%s", told)
        raise UnavailableError(f"outbound traffic cannot be captured: {told}")

    # Istio's.

    async def apply_istio(self, pilot_agent: Path, settings: CaptureSettings) -> None:
        """Has pilot-agent apply its rules, in place of all that are there. Raises UnavailableError; then
        there are none. Its own removal goes by the settings that it is told, and may look at the other
        interface of the kernel than its rules are in, so it is not used."""
        await self.remove()
        try:
            await self._restored("iptables", rules.mark())
            code, output, complaint = await self._run(*self.istio_command(pilot_agent, settings))
            if code:
                last = complaint or _last_line(output)
                raise UnavailableError(f"pilot-agent istio-iptables: {last or f'exit code {code}'}")
            if await self.found() == [rules.MARK]:
                raise UnavailableError("pilot-agent istio-iptables has added no rules")
        except BaseException:
            await self.remove()
            raise

    def istio_command(self, pilot_agent: Path, settings: CaptureSettings) -> list[str]:
        """As Istio's init container calls it, but nothing that comes in is captured (-b)."""
        own = self.own_rules(settings)
        excluded = [rules.METADATA, *settings.excluded_ranges]
        command = [str(pilot_agent), "istio-iptables", "-m", "REDIRECT", "-b", ""]
        command += ["-p", str(ports.OUTBOUND), "-z", str(ports.INBOUND), "-u", str(UID), "-g", str(UID)]
        command += ["-i", ",".join(settings.included_ranges or ()), "-x", ",".join(excluded)]
        command += ["-o", _listed(settings.excluded_ports or ()), "-q", _listed(settings.included_ports)]
        if settings.captures_dns:
            command.append("--redirect-dns")
        if own.ipv6 and _has_ipv6():
            command.append("--dual-stack")
        return command

    # What is there.

    async def remove(self) -> int:
        """Removes our rules and Istio's; how many chains that were. Raises UnavailableError if some cannot be
        removed."""
        return await self._remove(rules.PREFIXES)

    async def remove_left(self) -> int:
        """As `remove`, but Istio's only if krun has made them."""
        is_istio_s_ours = rules.MARK in await self.found()
        return await self._remove(rules.PREFIXES if is_istio_s_ours else rules.PREFIXES[:1])

    async def _remove(self, prefixes: tuple[str, ...]) -> int:
        count = 0
        for program, variant in reversed(self._all()):  # the mark last: a removal may be broken off
            saved = await self._saved(program, variant)
            text = rules.removal(saved, prefixes)
            if not text:
                continue
            code, _, complaint = await self._run(*_restore(variant), text=text)
            if code:
                told = complaint or f"exit code {code}"
                raise UnavailableError(f"rules cannot be removed: {variant}-restore: {told}")
            count += len(rules.chains(saved, prefixes))
        return count

    async def found(self) -> list[str]:
        """The chains that are ours or Istio's."""
        found: list[str] = []
        for program, variant in self._all():
            found += rules.chains(await self._saved(program, variant))
        return list(dict.fromkeys(found))

    async def _saved(self, program: str, variant: str) -> str:
        """What there is; empty where it cannot be told, for a kernel may know one interface only. All tables,
        for to ask for a certain one makes it."""
        code, output, complaint = await self._run(f"{variant}-save")
        if code:
            log.debug("%s-save: %s", variant, complaint or f"exit code {code}")
        return "" if code else output

    # Programs.

    def _all(self) -> list[tuple[str, str]]:
        return [(program, one) for program in ("iptables", "ip6tables") for one in self._variants(program)]

    def _variants(self, program: str) -> list[str]:
        """Those that are there, without the end of their names."""
        found = []
        for variant in VARIANTS:
            names = (f"{program}{variant}-restore", f"{program}{variant}-save")
            if all(shutil.which(name, path=self._path) for name in names):
                found.append(f"{program}{variant}")
        return found

    async def _run(self, *command: str, text: str = "") -> tuple[int, str, str]:
        """Exit code, output, and what it complains of in a line. Raises UnavailableError if it cannot be
        started, or does not end."""
        name = Path(command[0]).name
        program = shutil.which(command[0], path=self._path) or command[0]
        told_it = _file_of(text)  # no pipe: one that reads nothing may be gone before it is written to
        starting = spawn(
            asyncio.create_subprocess_exec(
                program,
                *command[1:],
                env={"PATH": self._path},
                stdin=told_it,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # with the programs that it starts
            ),
            name=f"start {name}",
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # uvloop does not end a program whose start is cancelled.
            with contextlib.suppress(OSError):
                await _end(await starting)
            raise
        except OSError as error:
            raise UnavailableError(f"cannot start {name}: {error.strerror or error}") from error
        finally:
            os.close(told_it)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                assert process.stdout is not None and process.stderr is not None
                output, complaint = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                await process.wait()
        except TimeoutError as error:
            await _end(process)
            raise UnavailableError(f"{name} has not ended within {TIMEOUT_S:g} s") from error
        except BaseException:
            await _end(process)
            raise
        return process.returncode or 0, output, _last_line(complaint)


_NO_CAUSES = ("Warning:", "#", "Try `", "Error occurred at line")


def printed(wanted: Rules) -> str:
    """Rules as a person applies them."""
    parts = [
        f"# {' '.join(_restore(program))}\n{text}"
        for program, text in (("iptables", wanted.ipv4), ("ip6tables", wanted.ipv6))
        if text
    ]
    return "".join(parts) or "# nothing is captured\n"


def quoted(command: Sequence[str]) -> str:
    """A command as a person types it."""
    return shlex.join(command)


def _restore(variant: str) -> list[str]:
    return [f"{variant}-restore", "--noflush", "--wait", str(WAIT_S)]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _last_line(text: str) -> str:
    """The last line that says something, without Go's time and level; iptables' hints are no cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(_NO_CAUSES) and "memlimit" not in line]
    return told[-1].rpartition("\t")[2][:200] if told else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills a program and those that it has started: pilot-agent's iptables-restore would still add rules
    while ours are being removed."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        async with asyncio.timeout(KILL_S):
            while True:  # those are not our children
                os.killpg(process.pid, 0)
                await asyncio.sleep(KILL_S / 100)


async def _read(stream: asyncio.StreamReader) -> str:
    """What a program says, up to the bound; one that says more is left waiting."""
    output = bytearray()
    while len(output) < MAX_OUTPUT_BYTES and (part := await stream.read(MAX_OUTPUT_BYTES - len(output))):
        output += part
    return output.decode("utf-8", "replace")


def _file_of(text: str) -> int:
    """A descriptor to read `text` from, the caller's to close."""
    descriptor = os.memfd_create("rules")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _name_servers() -> list[str]:
    try:
        with RESOLV_CONF.open("rb") as file:
            return rules.name_servers(file.read(MAX_FILE_BYTES).decode("latin-1"))
    except OSError:
        return []


def _has_ipv6() -> bool:
    """Whether this machine has an address of IPv6 that leads further than the next wire: a container without
    one may lack its tables, too."""
    try:
        return any(line.split()[3] == GLOBAL for line in INTERFACES.read_text().splitlines())
    except OSError:
        return False


def _has_net_admin() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_NET_ADMIN & 1)
    return False
