"""Who did what by ssh: a line in the log for each login, and for the begin and the end of each session and
forward; and the counts for metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shared.ops import families
from shared.ops.repeated_log import RepeatedLog

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.ssh")

Kind = Literal["shell", "exec", "sftp", "scp", "forward", "listen"]

KINDS: tuple[Kind, ...] = ("shell", "exec", "sftp", "scp", "forward", "listen")

MAX_COMMAND_CHARS = 200
"""Of a command in a line."""

MAX_CONNECTIONS = 100
"""At once. One more ends the oldest that nobody has logged in on, if it has had EVICT_AFTER_S."""

EVICT_AFTER_S = 2.0

LOGIN_S = 30.0
"""For the key exchange and the login."""

MAX_ATTEMPTS = 12
"""Keys that a client may offer: an agent has several."""

MAX_CHANNELS = 128
"""On a connection: sessions, forwarded connections, connections to the client's agent."""

MAX_SESSIONS = 64
"""On a connection."""

MAX_LISTENERS = 16
"""Ports and sockets that a connection may listen on (-R)."""

Limit = Literal["connections", "attempts", "channels", "sessions", "listeners"]


class Audit:
    """That of one krun."""

    def __init__(self) -> None:
        self._warnings = RepeatedLog(log)
        self._clients = 0
        self.connections: set[Client] = set()
        self.opened: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        """By kind."""
        self.logins: Counter[str] = Counter({"accepted": 0, "refused": 0})
        self.refused: Counter[str] = Counter()
        """By limit."""

    @property
    def logging_in(self) -> int:
        """Connections that nobody has logged in on."""
        return sum(not client.who for client in self.connections)

    def client(self, peer: str, forwarded_for: str | None) -> Client:
        """A connection, until its `end`. `peer` is who has asked for the tunnel, or has connected directly,
        and `forwarded_for` whom that one speaks for, as it says."""
        self._clients += 1
        one = Client(self, self._clients, peer, forwarded_for)
        self.connections.add(one)
        return one

    def limit(self, which: Limit, text: str) -> None:
        """A limit is reached."""
        self.refused[which] += 1
        self._warnings.warning(which, f"ssh: {text}")

    def families(self) -> Iterator[Metric]:
        """Metrics."""
        active = Counter(one.kind for client in self.connections for one in client.activities)
        yield families.SSH_CONNECTIONS.value(len(self.connections))
        yield families.SSH_CONNECTIONS_LIMIT.value(MAX_CONNECTIONS)
        yield families.SSH_LOGGING_IN.value(self.logging_in)
        yield families.SSH_LOGINS.metric(self.logins.items())
        yield families.SSH_ACTIVE.metric((kind, active[kind]) for kind in KINDS)
        yield families.SSH_OPENED.metric(self.opened.items())
        yield families.SSH_CHANNELS.value(max((client.channels for client in self.connections), default=0))
        yield families.SSH_CHANNELS_LIMIT.value(MAX_CHANNELS)
        yield families.SSH_REFUSED.metric(self.refused.items())

    def close(self) -> None:
        """Tells what has not been told yet."""
        self._warnings.close()


@dataclass(eq=False, slots=True)
class Client:
    """A connection to the sshd."""

    audit: Audit
    number: int
    peer: str
    forwarded_for: str | None
    who: str = ""
    """The key or certificate that has logged in; empty: none has yet."""
    channels: int = 0
    """Open ones, where the sshd tells."""
    activities: set[Activity] = field(default_factory=set)
    attempts: int = 0
    """Logins that were refused."""
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """By the loop's clock."""

    @property
    def place(self) -> str:
        """From where it is."""
        return self.peer if not self.forwarded_for else f"{self.peer} for {self.forwarded_for}"

    def refuse(self, reason: str) -> None:
        """A login is refused for that; few of the lines are written, for anybody can cause them."""
        self.audit._warnings.warning("refused", f"ssh: {reason}, from {self.place}")

    def logged_in(self, user: str, who: str) -> None:
        """A login was accepted."""
        if not self.who:
            self.who = who
            self.audit.logins["accepted"] += 1
            log.info("ssh %d: %s logs in as %s, from %s", self.number, who, user, self.place)

    def begin(self, kind: Kind, what: str = "") -> Activity:
        """A session or a forward begins; `what` is its command or where it leads."""
        self.audit.opened[kind] += 1
        one = Activity(self, kind, what)
        self.activities.add(one)
        log.info("ssh %d: %s begins: %s, from %s", self.number, one, self.who, self.place)
        return one

    def end(self, reason: str = "") -> None:
        """The connection is over, and with it what has not ended before."""
        if self not in self.audit.connections:
            return
        for one in list(self.activities):
            one.end("cut off")
        self.audit.connections.discard(self)
        if not self.who:
            self.audit.logins["refused"] += 1
            text = f"ssh: nobody logged in, from {self.place}{': ' if reason else ''}{reason}"
            self.audit._warnings.warning("login", text)


@dataclass(eq=False, slots=True)
class Activity:
    """A session or a forward."""

    client: Client
    kind: Kind
    what: str
    sent: int = 0
    """Bytes to the client."""
    received: int = 0
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    over: bool = False

    def __str__(self) -> str:
        if not self.what:
            return self.kind
        return f"{self.kind} {ascii(self.what) if self.kind in ('exec', 'scp') else self.what}"

    def end(self, how: str, *, counted: bool = True) -> None:
        """It is over; `how` is its exit code or the like. Not `counted`: nobody knows its bytes."""
        if self.over:
            return
        self.over = True
        client = self.client
        client.activities.discard(self)
        took_s = asyncio.get_running_loop().time() - self.began
        told = f", {self.sent} bytes sent, {self.received} received" if counted else ""
        log.info(
            "ssh %d: %s ends: %s after %.1f s%s; %s, from %s",
            *(client.number, self, how, took_s, told, client.who, client.place),
        )


def who(fingerprint: str, comments: Mapping[str, str], certificate: tuple[str, str, str] | None) -> str:
    """A key with its comment, of those that are known by fingerprint; and the identity, the serial number and
    the authority of the certificate that was shown for it, if one was."""
    comment = comments.get(fingerprint, "")
    told = f"key {fingerprint}{f' ({comment!a})' if comment else ''}"
    if certificate is None:
        return told
    identity, serial, authority = certificate
    return f"certificate {identity!a} serial {serial} of {authority}, {told}"


def shortened(command: str) -> str:
    """A command, or something else that a client has made up, for a line."""
    return command if len(command) <= MAX_COMMAND_CHARS else f"{command[:MAX_COMMAND_CHARS]}..."
