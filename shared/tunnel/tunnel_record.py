"""What is known of a tunnel, and its line in the access log: the one place that makes one.

Connections that came to no tunnel, connections of the mTLS end, and registrations have records, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Unpack

from shared.address import Address
from shared.errors import Flag, HboneError, StreamResetError

if TYPE_CHECKING:  # krun's mTLS end makes records before there is a tunnel
    from shared.net.relay.tunnel_clock import Carrying
    from shared.ops.access_log import AccessLog, Fields

    class WriteLine(Protocol):
        """A method of AccessLog."""

        def __call__(self, **fields: Unpack[Fields]) -> None: ...


MAX_PHASES = 16
"""Of a tunnel's opening that are kept: three for the first attempt, and more for each further one."""


@dataclass(slots=True)
class TunnelRecord:
    """Filled in by whoever carries the tunnel, as it goes. The line leaves out a field that is None, and
    `sni`, `route` and `identity` where they are empty."""

    peer: str
    """The downstream's address, HOST:PORT."""
    sni: str = ""
    """The server name that the client asked for, or that a workload registers."""
    route: str = ""
    """The host glob of its route, or the name of the port that it came to."""
    origin: str | None = None
    """The service that ends the tunnel's HTTP/2."""
    target: Address | str | None = None
    """Where its bytes go."""
    name: str | None = None
    """What the tunnel request asked for."""
    stream: int | None = None
    """Number of its HTTP/2 stream on the connection."""
    status: int | None = None
    """HTTP status of the tunnel request."""
    identity: str = ""
    """The SPIFFE name that the peer has proved, and that was let in."""
    forwarded_for: str | None = None
    """The client behind the peer, as the peer says."""
    forwarded_identity: str | None = None
    """The SPIFFE name of that client, likewise."""
    traceparent: str | None = None
    """W3C trace context of the tunnel request, by which its lines at other ends are found."""
    traced_by_peer: bool = False
    """The trace context came from the downstream, and its span is not ours."""
    phases: list[tuple[str, float, float]] | None = None
    """What its opening waited for, each with the loop's time when that began and ended; None: nobody wants to
    know."""
    attempts: int = 1
    """How often the tunnel was asked for."""
    sent_bytes: int | None = None
    """Towards the upstream."""
    received_bytes: int | None = None
    """From the upstream."""
    setup_s: float | None = None
    """Seconds until it was open."""
    duration_s: float | None = None
    """Seconds until its end."""
    flag: Flag = Flag.NONE
    """The response flag of its end."""
    error: HboneError | None = None
    """Why it was refused, or broke."""
    opened: bool = False
    """Whether it was open; else the line tells of a refusal."""

    def fail(self, error: HboneError, duration_s: float | None = None, *, one_ended: bool = False) -> None:
        """It was refused, or ended, for `error` after `duration_s` seconds. `one_ended`: it has no upstream
        yet, so a reset can only be the client's."""
        self.error = error
        self.flag = error.flag
        if one_ended and isinstance(error, StreamResetError):
            self.flag = Flag.DOWNSTREAM_RESET
        self.duration_s = duration_s

    def end(self, relay: Carrying, duration_s: float) -> None:
        """What it carried is over."""
        self.sent_bytes = relay.sent_bytes
        self.received_bytes = relay.received_bytes
        self.duration_s = duration_s
        error = self.error = relay.error
        if relay.broken_downstream:
            self.flag = Flag.DOWNSTREAM_RESET
        elif error is not None:
            self.flag = error.flag

    def waited(self, phase: str, began: float, ended: float) -> None:
        """Its opening waited for `phase` between these times of the loop."""
        if self.phases is not None and len(self.phases) < MAX_PHASES:
            self.phases.append((phase, began, ended))

    def write(self, access_log: AccessLog) -> None:
        """Writes its line."""
        self._write(access_log.tunnel if self.opened else access_log.refused)
        if access_log.finished is not None:
            access_log.finished(self)

    def write_registered(self, access_log: AccessLog) -> None:
        """Writes the line of a registration that begins."""
        self._write(access_log.registered)

    def write_unregistered(self, access_log: AccessLog) -> None:
        """Writes the line of its end."""
        self._write(access_log.tunnel)

    def _write(self, line: WriteLine) -> None:
        line(
            src_addr=self.peer,
            sni=self.sni or None,
            route=self.route or None,
            origin=self.origin,
            dst_addr=None if self.target is None else str(self.target),
            tunnel_target=self.name,
            stream=self.stream,
            status=self.status,
            identity=self.identity or None,
            forwarded_for=self.forwarded_for,
            forwarded_identity=self.forwarded_identity,
            traceparent=self.traceparent,
            attempts=self.attempts if self.attempts > 1 else None,
            bytes_sent=self.sent_bytes,
            bytes_recv=self.received_bytes,
            setup_s=self.setup_s,
            duration_s=self.duration_s,
            flags=self.flag,
            error=None if self.error is None else str(self.error),
        )
