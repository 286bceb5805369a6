"""krun's sshd: who enables it, which program serves, the port, and the bounds.

1. It is enabled by keys: in SSH_AUTH, in HBONE_SSH_FOLDER, in the Secret `sshdebug` of the workload's
   namespace. They are read at the start, beside everything else, and again at a connection when REFRESH_S
   have passed: a key that is taken away lets nobody in a minute later, and one that is new needs no restart.
2. krun listens on 127.0.0.1:15022 itself, and gives each connection to OpenSSH's sshd of the image, or to the
   built-in one. Neither runs, nor is imported, before the first connection.
3. A tunnel to /_hbone/22 tells who it is for, which the sshd itself cannot see.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.config.ssh_settings import SshSettings
from agent.ssh import host_keys, processes
from agent.ssh.audit import EVICT_AFTER_S, MAX_CONNECTIONS, Audit, Client
from agent.ssh.host_keys import HostKey
from agent.ssh.key_material import KeyMaterial
from agent.ssh.key_sources import NOT_ENABLED, KeySources
from agent.ssh.login import Login, environment, login
from shared.address import Address
from shared.errors import DialError, HboneError, UnavailableError
from shared.listen import BACKLOG, unavailable
from shared.net.dial import dial_protocol
from shared.net.legs.tcp import TcpLeg
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

    from agent.ssh.builtin import Builtin
    from agent.ssh.openssh import OpenSsh
    from shared.credentials.kubernetes.kubernetes_access import Access

log = logging.getLogger("hbone.ssh")

REFRESH_S = 60.0

READ_S = 5.0
"""For the API server to answer, while a client waits."""

FIRST_READ_S = 30.0
"""The same at the start, where nobody does."""

MAX_ORIGINS = 256
"""Connections that krun has dialled, and that have not been accepted."""

CLOSE_S = 0.5
"""For connections to end when krun does."""


@dataclass(slots=True)
class _Serving:
    """What serves now."""

    material: KeyMaterial
    host_keys: list[HostKey]
    user: Login
    openssh: OpenSsh | None = None
    builtin: Builtin | None = None

    @property
    def kind(self) -> str:
        return "builtin" if self.openssh is None else "openssh"


class Sshd:
    """That of one krun."""

    def __init__(
        self, settings: SshSettings, environ: Callable[[], Mapping[str, str]], access: Access | None
    ) -> None:
        """`environ` is asked for the app's environment. `access` leads to the cluster that MESH names; None:
        it names none."""
        self._settings = settings
        self._environ = environ
        self._sources = KeySources(settings, access)
        self.audit = Audit()
        self._serving: _Serving | None = None
        self._why = NOT_ENABLED
        """Nothing serves."""
        self._problem = ""
        """It is enabled, and cannot serve."""
        self._made: HostKey | None = None
        self._told: set[str] = set()
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._listening = "", 0
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: dict[Client, asyncio.Task[None]] = {}  # in the order of their accept
        self._origins: dict[tuple[str, int], tuple[str, str | None]] = {}  # by the address krun dials from
        self._closed = False

    @property
    def may_serve(self) -> bool:
        """Whether the settings leave it to keys that it serves."""
        return self._settings.server != "none" and self._settings.other is None

    def start(self) -> None:
        """Looks for keys, in a task: nothing waits for it."""
        settings = self._settings
        if not self.may_serve:
            if settings.auth or settings.folder is not None:
                cause = "HBONE_SSH=none" if settings.server == "none" else f"HBONE_SSHD={settings.other}"
                log.info("no sshd is started, for %s", cause)
            return
        if self._sources.are_named:
            self._read(FIRST_READ_S)

    async def connect(
        self, target: Address, timeout_s: float, peer: str, forwarded_for: str | None
    ) -> TcpLeg:
        """A connection to the sshd for a tunnel of `peer`, which says that it speaks for `forwarded_for`.

        Raises DialError: there is none, or it cannot serve; the text says what to do.
        """
        if self.may_serve:
            await self.refreshed()
            if self._problem:
                raise DialError(f"no sshd: {self._problem}")

        def make(sock: socket.socket | None) -> TcpLeg:
            if sock is not None and self._serving is not None and sock.getpeername()[:2] == self._listening:
                if len(self._origins) >= MAX_ORIGINS:
                    self._origins.pop(next(iter(self._origins)))
                self._origins[sock.getsockname()[:2]] = peer, forwarded_for
            return TcpLeg(sock)

        if self._serving is None and self.may_serve:
            try:
                return await dial_protocol(target, timeout_s, make)
            except DialError as error:
                raise DialError(f"{error}; {self._why}") from error
        if self._serving is not None:
            await self._import()
        return await dial_protocol(target, timeout_s, make)

    def families(self) -> Iterator[Metric]:
        """Metrics."""
        if self._serving is not None:
            yield from self.audit.families()

    def shown(self) -> dict[str, Any]:
        """For the admin port."""
        if self._serving is None:
            return {"enabled": False, "why": self._problem or self._why}
        serving = self._serving
        return {
            "enabled": True,
            "by": list(serving.material.origins),
            "server": serving.kind,
            "address": str(self._settings.listen),
            "user": serving.user.name,
            "shell": serving.user.shell,
            "host_keys": [
                {
                    "type": key.kind,
                    "fingerprint": key.fingerprint,
                    "name": key.name,
                    "certificate": bool(key.certificate),
                }
                for key in serving.host_keys
            ],
            "keys": [
                {
                    "type": key.kind,
                    "fingerprint": key.fingerprint,
                    "comment": key.comment,
                    "authority": key.is_authority,
                }
                for key in serving.material.keys
            ],
            "connections": [
                {
                    "number": one.number,
                    "from": one.place,
                    "who": one.who,
                    "active": [str(activity) for activity in one.activities],
                }
                for one in self.audit.connections
            ],
        }

    async def close(self) -> None:
        """Ends all connections, and the processes of their sessions, daemons among them included."""
        self._closed = True
        waits = [task for task in (self._reading, self._accepting) if task is not None]
        for task in (*waits, *self._tasks.values()):
            task.cancel()
        if self._listener is not None:
            self._listener.close()
            own = f" {self._listening[0]} {self._listening[1]}"
            processes.send(signal.SIGHUP, processes.of_connection(own))
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=CLOSE_S)
            processes.send(signal.SIGKILL, processes.of_connection(own))
        if self._serving is not None and self._serving.openssh is not None:
            self._serving.openssh.close(at_once=True)
        self.audit.close()

    # Keys.

    async def refreshed(self) -> None:
        """Returns when what serves is as the keys say, or READ_S later."""
        now = asyncio.get_running_loop().time()
        if self._reading is None and (self._read_at is None or now - self._read_at >= REFRESH_S):
            self._read(READ_S)
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=READ_S)

    def _read(self, timeout_s: float) -> None:
        def over(task: asyncio.Task[None]) -> None:
            if self._reading is task:
                self._reading = None

        self._reading = spawn(self._apply(timeout_s), name="keys of the sshd")
        self._reading.add_done_callback(over)

    async def _apply(self, timeout_s: float) -> None:
        try:
            material = await self._sources.read(timeout_s)
        except HboneError as error:
            self._problem = "" if self._serving else str(error)
            self._warn(f"keys of the sshd: {error}")
            return
        finally:
            self._read_at = asyncio.get_running_loop().time()
        self._why = self._sources.why_none
        for warning in material.warnings:
            self._warn(warning)
        serving = self._serving
        if not material.enables:
            self._problem = ""
            if serving is not None:
                log.info("the sshd serves no longer: nobody may log in any more")
                self._replace(None)
            return
        if serving is not None and serving.material.digest == material.digest:
            return
        try:
            self._listen()
        except UnavailableError as error:  # an sshd of the image's own, perhaps
            self._why = f"krun starts none: {error}"
            self._warn(f"{error}: krun starts none")
            return
        try:
            made = await self._make(material)
        except UnavailableError as error:
            self._problem = str(error)
            self._warn(f"no sshd: {error}")
            self._replace(None)
            return
        self._problem = ""
        self._replace(made)
        prints = ", ".join(f"{key.fingerprint} ({key.kind}, {key.name})" for key in made.host_keys)
        log.info(
            "sshd on %s by %s: %s, user %s, %d keys, host key %s",
            *(self._settings.listen, " and ".join(material.origins), made.kind, made.user.name),
            *(len(material.keys), prints),
        )

    def _replace(self, serving: _Serving | None) -> None:
        if self._serving is not None and self._serving.openssh is not None:
            self._serving.openssh.close()
        self._serving = serving

    def _warn(self, text: str) -> None:
        """Once for each text."""
        if text not in self._told and len(self._told) < 1000:
            self._told.add(text)
            log.warning("%s", text)

    # Which program.

    def _session_environment(self, user: Login) -> Callable[[], dict[str, str]]:
        return lambda: environment(user, self._environ())

    async def _make(self, material: KeyMaterial) -> _Serving:
        """Raises UnavailableError."""
        settings = self._settings
        user = login(settings.user)
        found, warnings = await asyncio.to_thread(
            host_keys.read, material.host_keys, material.host_certificates
        )
        for warning in warnings:
            self._warn(warning)
        if not found:
            if self._made is None:
                self._made = await asyncio.to_thread(host_keys.make)
            found = [self._made]
        serving = _Serving(material, found, user)
        if settings.server != "builtin":
            from agent.ssh.openssh import OpenSsh

            try:
                serving.openssh = await OpenSsh.start(
                    material.keys, found, user, self._session_environment(user), material.config
                )
            except UnavailableError as error:
                if settings.server == "openssh":
                    raise UnavailableError(f"HBONE_SSH=openssh: {error}") from error
                if material.config:
                    self._warn(f"sshd_config is not used, for OpenSSH's sshd cannot serve: {error}")
                log.info("the built-in sshd serves, for OpenSSH's cannot: %s", error)
        elif material.config:
            self._warn("sshd_config is not used: HBONE_SSH=builtin")
        if serving.openssh is None and not material.keys:
            raise UnavailableError(NOT_ENABLED)
        return serving

    async def _import(self) -> None:
        """Makes the built-in sshd, if that is what serves. Raises DialError."""
        serving = self._serving
        if serving is None or serving.openssh is not None or serving.builtin is not None:
            return
        try:
            module = await asyncio.to_thread(_builtin)
            if serving.builtin is None:
                environ = self._session_environment(serving.user)
                serving.builtin = module.Builtin(
                    serving.material.keys, serving.host_keys, serving.user, environ
                )
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "asyncssh":
                raise
            raise DialError(
                "no sshd: the image has none that can serve, nor asyncssh: install hbone[ssh] in it"
            ) from None
        except UnavailableError as error:
            raise DialError(f"no sshd: {error}") from error

    # Connections.

    def _listen(self) -> None:
        """Raises UnavailableError: somebody else has the port."""
        if self._listener is not None:
            return
        address = self._settings.listen
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1" if address.host == "localhost" else address.host, address.port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise unavailable("sshd", address, error) from error
        self._listener = listener
        self._listening = listener.getsockname()[:2]
        self._accepting = spawn(self._accept(listener), name="sshd")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is left, or the client has gone
                self._warn(f"sshd: cannot accept: {error.strerror}")
                await asyncio.sleep(0.1)
                continue
            origin = self._origins.pop(peer[:2], (f"{peer[0]}:{peer[1]}", None))
            if self._refuses():
                sock.close()
                continue
            client = self.audit.client(*origin)
            task = spawn(self._serve(sock, client), name=f"ssh {client.number}")
            self._tasks[client] = task
            task.add_done_callback(partial(self._over, client))

    def _over(self, client: Client, _: asyncio.Task[None]) -> None:
        self._tasks.pop(client, None)

    def _refuses(self) -> bool:
        if self._serving is None or self._closed:
            return True
        if len(self._tasks) < MAX_CONNECTIONS:
            return False
        told = f"{MAX_CONNECTIONS} connections are open"
        before = asyncio.get_running_loop().time() - EVICT_AFTER_S
        for client, task in self._tasks.items():
            if not client.who and client.since <= before and not task.cancelling():
                self.audit.limit("connections", f"{told}: one that nobody has logged in on is ended")
                task.cancel()
                return False
        self.audit.limit("connections", f"{told}: one more is closed")
        return True

    async def _serve(self, sock: socket.socket, client: Client) -> None:
        try:
            await self.refreshed()
            serving = self._serving
            if serving is None:
                return
            if serving.openssh is not None:
                await serving.openssh.serve(sock, client)
                return
            await self._import()
            if serving.builtin is not None:
                await serving.builtin.serve(sock, client)
        except DialError as error:
            self._warn(str(error))
        finally:
            with contextlib.suppress(OSError):
                sock.close()
            client.end()


def _builtin() -> Any:
    from agent.ssh import builtin

    return builtin
