"""Why a tunnel ended, as one line for the person at the terminal.

The likely cause follows from how the tunnel ended, and at what age. A front end passes on that a stream was
reset, but seldom why: Cloud Run documents no error codes. So a cause that is a guess ends with a question
mark, and is followed by what was observed, in brackets.
"""

from __future__ import annotations

from dataclasses import dataclass

from hbone.target import TunnelTarget
from shared.errors import HboneError, StreamResetError
from shared.http2 import frames
from shared.net.http2.connection import Connection as Http2Connection

TIMEOUT_STEP_S = 60.0
"""Request timeouts are nearly always whole minutes; Cloud Run's default is five."""

EARLY_S, LATE_S = 0.5, 3.0
"""How much earlier or later than the request timeout the reset may come: the front end's clock starts when it
has the request, and the reset has to travel back."""

_RESETS = {
    frames.NO_ERROR: "the far side has finished with it; the container is stopping?",
    frames.PROTOCOL_ERROR: "the far side, or a proxy on the way, found a protocol error",
    frames.INTERNAL_ERROR: "the container, or a proxy before it, failed; has the container crashed?",
    frames.FLOW_CONTROL_ERROR: "the far side, or a proxy on the way, found a protocol error",
    frames.REFUSED_STREAM: "the far side accepts no new tunnel; the container is stopping?",
    frames.CANCEL: "the far side cancelled it; the container is stopping?",
    frames.CONNECT_ERROR: "the target in the container broke off, or the container is stopping?",
    frames.ENHANCE_YOUR_CALM: "the far side complains of too much traffic",
}
"""What RST_STREAM's codes mean in a tunnel (RFC 9113 sections 7 and 8.5)."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What is known of the tunnel's HTTP/2 connection when the tunnel is over."""

    host: str
    """The host of the tunnel's URL."""

    behind_front_end: bool
    """Whether something ends TLS before the container."""

    lost: bool
    """The connection itself is over."""

    unanswered_s: float
    """Seconds without an answer to a PING, if the connection was given up for that; else 0."""

    goaway_code: int | None
    """The error code of the GOAWAY that was received, None if there was none."""

    @classmethod
    def of(cls, connection: Http2Connection, target: TunnelTarget) -> Connection:
        """What `connection`, to the origin of `target`, has seen."""
        return cls(
            host=target.host,
            behind_front_end=target.scheme == "https",
            lost=connection.lost,
            unanswered_s=connection.unanswered_s,
            goaway_code=connection.goaway_code,
        )


def cause(error: HboneError, age_s: float, connection: Connection) -> str:
    """The likely cause of `error`, which ended a tunnel `age_s` seconds after its request, and what was
    observed."""
    if connection.unanswered_s:
        return f"no answer from {connection.host} for {connection.unanswered_s:g} s; is the line down?"
    if not isinstance(error, StreamResetError):
        return str(error)
    seen = str(error) if connection.lost else f"reset with {frames.error_name(error.code)}"
    if connection.goaway_code is not None:
        seen = f"GOAWAY with {frames.error_name(connection.goaway_code)}, then {seen}"
    return f"{_likely(error, age_s, connection)} ({seen})"


def age(seconds: float) -> str:
    """The age of a tunnel as text: seconds, with tenths below 10 s; minutes from two on, whole ones from ten
    on."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def _likely(error: StreamResetError, age_s: float, connection: Connection) -> str:
    if connection.behind_front_end and _is_request_timeout(age_s):
        return "the service's request timeout? A new connection may reach another instance"
    match connection.goaway_code:
        case None:
            pass
        case frames.NO_ERROR if connection.behind_front_end:
            return "the container, or the front end before it, is stopping"
        case frames.NO_ERROR:
            return "the container is stopping"
        case frames.ENHANCE_YOUR_CALM:
            return "the far side complains of too much traffic; too many PINGs? (try --keepalive 60)"
        case _:
            return "the far side, or a proxy on the way, found a protocol error"
    if connection.lost:
        return "the connection broke; has the container, or the network on the way, gone?"
    return _RESETS.get(error.code, "the far side broke it off")


def _is_request_timeout(age_s: float) -> bool:
    over_s = (age_s + EARLY_S) % TIMEOUT_STEP_S
    return age_s + EARLY_S >= TIMEOUT_STEP_S and over_s <= EARLY_S + LATE_S
