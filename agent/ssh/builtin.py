"""The built-in sshd: asyncssh on connections that krun has accepted. Only this module, and the two beside it,
import asyncssh, which takes 0.15 s and 20 MiB; they are imported at the first connection.

asyncssh knows fewer options of authorized keys than OpenSSH. A key with one that it would pass over, and so
allow too much, is not used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import asyncssh
from asyncssh.constants import DISC_NO_MORE_AUTH_METHODS_AVAILABLE, OPEN_RESOURCE_SHORTAGE

from agent.config.public_keys import AUTHORITY, AuthorizedKey, Presented, presented
from agent.ssh import builtin_forwards
from agent.ssh.audit import (
    LOGIN_S,
    MAX_ATTEMPTS,
    MAX_CHANNELS,
    MAX_LISTENERS,
    MAX_SESSIONS,
    Client,
    shortened,
    who,
)
from agent.ssh.builtin_session import Session
from agent.ssh.host_keys import HostKey
from agent.ssh.login import Login
from agent.ssh.processes import GRACE_S
from shared.errors import UnavailableError

log = logging.getLogger("hbone.ssh")

VERSION = "krun"

WINDOW_BYTES = 1 << 20
"""What a client may send on a channel before it is taken."""

KEY_EXCHANGES = "-diffie-hellman-*,rsa*"
"""asyncssh's own without those that take 10 ms and more of the event loop each time that a client asks, who
need not have a key: the rest take less than one, and OpenSSH's clients know them since 6.5."""

END_S = GRACE_S + 2.0
"""For the programs of a connection that is closed."""

_RESTRICTED = ("pty", "port-forwarding", "agent-forwarding")
"""What `restrict` takes away, of what there is here, and an option of the name gives back (sshd(8))."""

_HERE = {AUTHORITY, "from", "command", "permitopen", "principals", *(f"no-{name}" for name in _RESTRICTED)}
"""Options that asyncssh holds to."""

_NOTHING = {"environment", "no-x11-forwarding", "x11-forwarding", "no-user-rc", "user-rc", "tunnel"}
"""Options about what is not offered at all."""


def held_to(key: AuthorizedKey) -> AuthorizedKey:
    """The key with its options as asyncssh knows them. Raises UnavailableError if it has others."""
    names = {name for name, _ in key.options}
    if strange := sorted(names - _HERE - _NOTHING - {"restrict", *_RESTRICTED}):
        raise UnavailableError(
            f"the key {key.fingerprint} ({key.comment}) is not used: the built-in sshd has no option "
            f"{strange[0]}"
        )
    options = [(name, value) for name, value in key.options if name in _HERE]
    told = [name for name, _ in key.options]
    if "restrict" in told:
        given_back = told[len(told) - told[::-1].index("restrict") :]  # what is before it, it takes away
        options += [(f"no-{name}", None) for name in _RESTRICTED if name not in given_back]
    return AuthorizedKey(tuple(options), key.kind, key.blob, key.comment)


class Builtin:
    """For one set of keys."""

    def __init__(
        self,
        keys: Sequence[AuthorizedKey],
        host_keys: Sequence[HostKey],
        user: Login,
        environ: Callable[[], Mapping[str, str]],
    ) -> None:
        """`environ` is asked for that of a session. Raises UnavailableError if nobody could log in, or a host
        key or its certificate cannot be used."""
        self.user = user
        self.environ = environ
        self.comments = {key.fingerprint: key.comment for key in keys}
        self.open_to: dict[str, bool] = {}
        """Authorities, by fingerprint: whether all their lines have principals of their own."""
        lines = []
        for key in keys:
            try:
                held = held_to(key)
            except UnavailableError as error:
                log.warning("ssh: %s", error)
                continue
            lines.append(held.line())
            if held.is_authority:
                open_to = self.open_to.get(held.fingerprint, True)
                self.open_to[held.fingerprint] = open_to and held.has("principals")
        if not lines:
            raise UnavailableError("no key is left that may log in")
        try:
            self._options = asyncssh.SSHServerConnectionOptions(
                server_host_keys=[_pair(key) for key in host_keys],
                authorized_client_keys=asyncssh.import_authorized_keys("\n".join(lines)),
                server_version=VERSION,
                kex_algs=KEY_EXCHANGES,
                x509_trusted_certs=None,
                gss_host=None,
                host_based_auth=False,
                password_auth=False,
                kbdint_auth=False,
                line_editor=False,
                encoding=None,
                window=WINDOW_BYTES,
                compression_algs=None,
                login_timeout=LOGIN_S,
            )
        except (ValueError, asyncssh.Error) as error:
            raise UnavailableError(f"the host's keys: {error}") from error

    async def serve(self, sock: socket.socket, client: Client) -> None:
        """Serves a connection to its end; cancelled, it ends it. The socket is closed then."""
        loop = asyncio.get_running_loop()
        peer, own = sock.getpeername(), sock.getsockname()
        ends = f"{peer[0]} {peer[1]} {own[0]} {own[1]}"
        connection = _Connection(loop, self._options, client, self, ends)
        await loop.connect_accepted_socket(lambda: connection, sock)
        try:
            await connection.wait_closed()
        finally:
            if not connection.is_closed():
                connection.disconnect(asyncssh.DISC_BY_APPLICATION, "krun stops")
                connection.abort()
            await connection.emptied()


class _Connection(asyncssh.SSHServerConnection):
    """One of a client's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: asyncssh.SSHServerConnectionOptions,
        client: Client,
        server: Builtin,
        ends: str,
    ) -> None:
        # What the connection tells its owner, and asks it, this object knows itself.
        self._server_of_keys = server
        self._client = client
        self._ends = ends
        self._pipe: asyncio.Transport | None = None
        self._is_full = False
        self._shown: Presented | None = None
        self._sessions = 0
        self._tasks_of_sessions: set[asyncio.Task[None]] = set()
        super().__init__(loop, options)
        self._protocol_factory = lambda: _Owner(self)

    @property
    def client(self) -> Client:
        """Whose it is."""
        return self._client

    # Flow: whoever does not read what we send is not read from, so answers do not heap up; nor do his
    # channels send on, for their windows are as large as he says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipe = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        self._is_full = True
        if self._pipe is not None and not self._pipe.is_closing():
            self._pipe.pause_reading()

    def resume_writing(self) -> None:
        if self._pipe is not None and not self._pipe.is_closing():
            self._pipe.resume_reading()
        self._is_full = False
        for channel in list(self._channels.values()):
            channel._flush_send_buf()

    def _flush_channel(self, channel: Any) -> None:
        """In place of the channel's own `_flush_send_buf`, which the connection's state does not hold up."""
        if self._is_full:
            channel._pause_resume_writing()
        else:
            type(channel)._flush_send_buf(channel)

    # Logging in.

    async def validate_public_key(self, username: str, key_data: bytes, msg: bytes, signature: bytes) -> bool:
        try:
            shown = presented(key_data)
        except ValueError:
            return False
        if shown.is_certificate and not self._may_be(username, shown):
            self._client.refuse(
                f"certificate {shortened(shown.identity)!a} is not for user {username!a}, but for "
                f"{shortened(', '.join(shown.principals))!a}"
            )
            return False
        # asyncssh would keep those of a certificate for a key that comes after it.
        self._key_options, self._cert_options = {}, None
        accepted = await super().validate_public_key(username, key_data, msg, signature)
        forced = {self.get_certificate_option("force-command"), self.get_key_option("command")} - {None}
        if accepted and len(forced) > 1:
            self._client.refuse(
                f"certificate {shortened(shown.identity)!a} forces another command than its authority's line"
            )
            return False
        if accepted and signature:
            self._shown = shown
        return accepted

    def _may_be(self, username: str, shown: Presented) -> bool:
        """A certificate is for names of users, and sessions have one user, whatever name a client asks for.
        Its line's principals, if it has some, are asyncssh's to check."""
        own_principals = self._server_of_keys.open_to.get(shown.authority, False)
        return own_principals or (username == self._server_of_keys.user.name and username in shown.principals)

    def send_userauth_failure(self, partial_success: bool) -> None:
        self._client.attempts += 1
        if self._client.attempts > MAX_ATTEMPTS:
            self._client.audit.limit(
                "attempts", f"more than {MAX_ATTEMPTS} attempts, from {self._client.place}"
            )
            raise asyncssh.DisconnectError(DISC_NO_MORE_AUTH_METHODS_AVAILABLE, "Too many attempts")
        super().send_userauth_failure(partial_success)

    def logged_in(self) -> None:
        """Says who it is."""
        shown = self._shown
        assert shown is not None
        told = who(
            shown.key_fingerprint,
            self._server_of_keys.comments,
            (shown.identity, str(shown.serial), shown.authority) if shown.is_certificate else None,
        )
        self._client.logged_in(self._server_of_keys.user.name, told)

    # Bounds.

    def add_channel(self, chan: Any) -> int:
        if self._client.channels >= MAX_CHANNELS:
            self._client.audit.limit(
                "channels", f"{MAX_CHANNELS} channels are open, from {self._client.place}"
            )
            raise asyncssh.ChannelOpenError(OPEN_RESOURCE_SHORTAGE, f"{MAX_CHANNELS} channels are open")
        number = super().add_channel(chan)
        chan._flush_send_buf = partial(self._flush_channel, chan)
        self._client.channels += 1
        return number

    def remove_channel(self, recv_chan: int) -> None:
        super().remove_channel(recv_chan)
        self._client.channels -= 1

    # What is asked for.

    def session(self) -> Session:
        """A new one. Raises ChannelOpenError."""
        client = self._client
        if self._sessions >= MAX_SESSIONS:
            client.audit.limit("sessions", f"{MAX_SESSIONS} sessions are open, from {client.place}")
            raise asyncssh.ChannelOpenError(OPEN_RESOURCE_SHORTAGE, f"{MAX_SESSIONS} sessions are open")
        self._sessions += 1
        environ = self._server_of_keys.environ()
        return Session(
            client, self._server_of_keys.user, environ, self._ends, self._session_over, self._running
        )

    def _session_over(self) -> None:
        self._sessions -= 1

    def _running(self, task: asyncio.Task[None]) -> None:
        self._tasks_of_sessions.add(task)
        task.add_done_callback(self._tasks_of_sessions.discard)

    def may_listen(self) -> bool:
        """Whether the client may listen on one more."""
        if sum(one.kind == "listen" for one in self._client.activities) < MAX_LISTENERS:
            return True
        self._client.audit.limit(
            "listeners", f"{MAX_LISTENERS} ports are listened on, from {self._client.place}"
        )
        return False

    @property
    def user(self) -> Login:
        """Of its sessions."""
        return self._server_of_keys.user

    async def create_agent_listener(self) -> bool:
        made = await super().create_agent_listener()
        path = self.get_agent_path()
        if made and path is not None and not self.user.is_own:
            for one in (path, os.path.dirname(path)):
                os.chown(one, self.user.uid, self.user.gid)
        return made

    async def emptied(self) -> None:
        """Waits until it is closed, and the programs of its sessions have ended."""
        await self.wait_closed()
        if self._tasks_of_sessions:
            await asyncio.wait(self._tasks_of_sessions, timeout=END_S)


class _Owner(asyncssh.SSHServer):
    """What a connection asks. Passwords are answered by `False` already."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def begin_auth(self, username: str) -> bool:
        return True

    def auth_completed(self) -> None:
        self._connection.logged_in()

    def session_requested(self) -> Session:
        return self._connection.session()

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        return builtin_forwards.to_port(self._connection.client, dest_host, dest_port)

    def unix_connection_requested(self, dest_path: str) -> Any:
        if not self._connection.user.is_own:
            return False
        return builtin_forwards.to_socket(self._connection.client, dest_path)

    async def server_requested(self, listen_host: str, listen_port: int) -> Any:
        if not self._connection.may_listen():
            return False
        connection = self._connection
        return await builtin_forwards.listen(
            connection, connection.client, listen_host, listen_port, is_root=connection.user.uid == 0
        )

    async def unix_server_requested(self, listen_path: str) -> Any:
        if not self._connection.user.is_own or not self._connection.may_listen():
            return False
        connection = self._connection
        listener = await connection.forward_local_path(listen_path, listen_path)
        return builtin_forwards.Listening(listener, connection.client.begin("listen", f"on {listen_path!a}"))


def _pair(key: HostKey) -> Any:
    private = asyncssh.import_private_key(key.private)
    if not key.certificate:
        return private
    return private, asyncssh.import_certificate(key.certificate)
