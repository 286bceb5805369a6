"""How the app's outbound traffic gets into the mesh: chosen at the start, with the reason, undone at the end.

1. Only Envoy under pilot-agent knows the way to the mesh's services, so without it nothing is captured.
2. Rules are there before pilot-agent starts, and so before the app does, as in a pod. They are removed when
   krun ends, and when its start fails.
3. krun's own connections are not captured: they have the group that the rules leave alone. Else krun could
   not reach istiod, or a gateway, while Envoy is down. Programs that krun starts have their own group.
4. pilot-agent's own command makes the rules where it can, else krun does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

from agent.capture import leftovers
from agent.capture.iptables import Iptables
from agent.config.capture_settings import CaptureMode, CaptureSettings
from agent.config.pilot_settings import UID
from shared.errors import UnavailableError

log = logging.getLogger("hbone.capture")

SHOWN = 5
"""Ranges and ports that a line of the log names."""

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
"""linux/prctl.h."""


class Capture:
    """Made by the agent; nothing is changed before `start`."""

    def __init__(
        self, settings: CaptureSettings, search_path: str | None, *, proxy_taken_by: str = ""
    ) -> None:
        """`search_path` is where iptables is looked for, as PATH. `proxy_taken_by` names the setting that
        HTTP_PROXY of the app is for, beside `settings`; empty: none."""
        self.mode: CaptureMode = "none"
        """What it is; never `auto`."""
        self._settings = settings
        self._proxy_taken_by = proxy_taken_by
        self._iptables = Iptables(search_path)
        self._may_have_rules = False
        self._name: socket.socket | None = None  # held while there may be rules

    async def start(self, inbound: str, pilot_agent: Path | None) -> None:
        """Chooses, and applies the rules if it is `iptables`. `inbound` is the mTLS end; pilot-agent's path
        if it is that. May be cancelled; `close` then undoes it.

        Raises UnavailableError if HBONE_CAPTURE asks for what cannot be had here, or if rules cannot be
        removed.
        """
        asked = self._settings.mode
        if pilot_agent is None:
            if asked in ("iptables", "proxy"):
                raise UnavailableError(
                    f"HBONE_CAPTURE={asked}: the mTLS end is {inbound}, and only Envoy under pilot-agent "
                    "leads into the mesh: set HBONE_INBOUND=pilot-agent and XDS_ADDR"
                )
            self._told("none", f"the mTLS end is {inbound}")
        elif asked == "none":
            self._told("none", "HBONE_CAPTURE=none")
        elif asked == "proxy":
            self._told("proxy", "HBONE_CAPTURE=proxy")
        elif not (lacking := self._iptables.lacking()):
            try:
                by = await self._apply(pilot_agent)
            except UnavailableError as error:
                if asked == "iptables":
                    raise UnavailableError(f"HBONE_CAPTURE=iptables: {error}") from error
                await self._fall_back(str(error))
            else:
                self._told("iptables", f"{self._what()}, by {by}")
        elif asked == "iptables":
            raise UnavailableError(f"HBONE_CAPTURE=iptables: {lacking}: set HBONE_CAPTURE=proxy")
        else:
            await self._fall_back(lacking)

    async def close(self, timeout_s: float | None = None) -> None:
        """Removes the rules, within `timeout_s` seconds; what cannot be removed is logged."""
        if not self._may_have_rules:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._remove()
        except UnavailableError as error:
            log.warning("%s; `krun capture remove` tries again", error)
        except TimeoutError:
            log.warning("rules are not removed within %.1f s; `krun capture remove` tries again", timeout_s)
        finally:
            if self._name is not None:
                self._name.close()  # what is left now is nobody's

    async def _remove(self) -> None:
        """Raises UnavailableError; then krun keeps its group, because rules may be left."""
        await self._iptables.remove()
        self._may_have_rules = False
        if self._name is not None:
            self._name.close()
        _set_group(os.getegid())

    async def _apply(self, pilot_agent: Path) -> str:
        """Applies the rules; returns whose they are."""
        self._name = leftovers.held()
        if self._name is None:
            raise UnavailableError("another krun captures in this network namespace already")
        self._may_have_rules = True
        if not _set_group(UID):
            raise UnavailableError(
                "krun may not change its group (SETGID), and would capture its own traffic"
            )
        return await self._iptables.apply(pilot_agent, self._settings)

    async def _fall_back(self, reason: str) -> None:
        """From `auto`, where there can be no rules. Raises UnavailableError if some cannot be removed."""
        if self._may_have_rules:
            await self._remove()
        taken_by = "HBONE_SERVICES" if self._settings.services is not None else self._proxy_taken_by
        if taken_by:
            self._told("none", f"{reason}, and HTTP_PROXY is for {taken_by}")
        else:
            self._told("proxy", reason)

    def _told(self, mode: CaptureMode, reason: str) -> None:
        self.mode = mode
        log.info("outbound traffic: %s (%s)", mode, reason)

    def _what(self) -> str:
        settings = self._settings
        told = [*(settings.included_ranges or ()), *(f"port {port}" for port in settings.included_ports)]
        return ", ".join(told) if len(told) <= SHOWN else f"{', '.join(told[:SHOWN])}, ..."


def _set_group(group: int) -> bool:
    """Gives the sockets and files that this thread makes from now on the group `group`, as their owner in
    iptables' sense, and nothing else; a program that is started has its own again (setfsgid(2), execve(2)).
    Returns whether that is so now.

    Our own group becomes one of the supplementary groups, too. Else Linux 6.16 and newer take a program that
    is started for one with set-group-ID (security/commoncap.c), and it ignores LD_LIBRARY_PATH, SSL_CERT_FILE
    and the like (ld.so(8), secure_getenv(3))."""
    import ctypes  # 10 ms, for those who capture

    libc = ctypes.CDLL(None)
    dumpable = libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    own = os.getegid()
    if own not in os.getgroups():
        try:
            os.setgroups([own, *os.getgroups()])
        except OSError:
            return False
    libc.setfsgid(group)
    done = bool(libc.setfsgid(group) == group)
    libc.prctl(_PR_SET_DUMPABLE, dumpable, 0, 0, 0)  # the kernel has cleared it with the group (prctl(2))
    return done
