"""What a person reads when a tunnel has ended: the likely cause, and what was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hbone.tunnel_end import Connection, age, cause
from shared.errors import HalfClosedError, StreamResetError, UpstreamError
from shared.http2 import frames

OPEN = Connection("hello.a.run.app", behind_front_end=True, lost=False, unanswered_s=0, goaway_code=None)
"""The connection goes on, the stream alone is over."""

LOST = replace(OPEN, lost=True)
OWN = replace(OPEN, host="127.0.0.1", behind_front_end=False)
"""Straight to krun."""


def reset(code: int) -> StreamResetError:
    return StreamResetError(f"stream reset by the peer: {frames.error_name(code)}", code)


BROKEN = StreamResetError("connection to 10.0.0.1:443 lost: closed by the peer", frames.CANCEL)


@pytest.mark.parametrize(
    ("age_s", "is_timeout"),
    [
        *((seconds, True) for seconds in (59.6, 60, 300, 300.4, 302.9, 3600, 3601)),
        *((seconds, False) for seconds in (0, 0.3, 59.4, 63.1, 150, 290, 299.4, 3590)),
    ],
)
def test_the_ages_of_a_request_timeout(age_s: float, is_timeout: bool) -> None:
    for error, connection in ((reset(frames.INTERNAL_ERROR), OPEN), (BROKEN, LOST)):
        told = cause(error, age_s, connection)
        assert told.startswith("the service's request timeout? A new connection ") is is_timeout


def test_who_dials_krun_itself_meets_no_request_timeout() -> None:
    assert "timeout" not in cause(reset(frames.CONNECT_ERROR), 300, OWN)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (frames.CONNECT_ERROR, "the target in the container broke off, or the container is stopping?"),
        (frames.INTERNAL_ERROR, "has the container crashed?"),
        (frames.CANCEL, "the container is stopping?"),
        (frames.NO_ERROR, "the container is stopping?"),
        (frames.FLOW_CONTROL_ERROR, "protocol error"),
        (frames.ENHANCE_YOUR_CALM, "too much traffic"),
        (0x4D, "the far side broke it off (reset with error 0x4d)"),
    ],
)
def test_codes_of_a_reset(code: int, text: str) -> None:
    told = cause(reset(code), 12, OPEN)
    assert text in told
    assert told.endswith(f"(reset with {frames.error_name(code)})")


def test_every_code_of_a_reset_has_a_cause_or_the_general_one() -> None:
    assert all(cause(reset(code), 12, OPEN) for code in range(0x20))


@pytest.mark.parametrize(
    ("connection", "code", "text"),
    [
        (OWN, frames.NO_ERROR, "the container is stopping (GOAWAY with NO_ERROR, then "),
        (OPEN, frames.NO_ERROR, "the container, or the front end before it, is stopping (GOAWAY"),
        (OPEN, frames.ENHANCE_YOUR_CALM, "too many PINGs? (try --keepalive 60)"),
        (OPEN, frames.PROTOCOL_ERROR, "protocol error (GOAWAY with PROTOCOL_ERROR"),
    ],
)
def test_goaway_before_the_end(connection: Connection, code: int, text: str) -> None:
    told = replace(connection, lost=True, goaway_code=code)
    assert text in cause(BROKEN, 12, told)


def test_a_connection_that_broke() -> None:
    assert cause(BROKEN, 12, LOST) == (
        "the connection broke; has the container, or the network on the way, gone? "
        "(connection to 10.0.0.1:443 lost: closed by the peer)"
    )


def test_silence_is_the_cause_whatever_else_there_was() -> None:
    silent = replace(LOST, unanswered_s=30.0, goaway_code=frames.NO_ERROR)
    assert cause(BROKEN, 300, silent) == "no answer from hello.a.run.app for 30 s; is the line down?"


def test_what_was_no_reset_says_it_itself() -> None:
    assert cause(HalfClosedError("half-closed: the client has ended"), 300, OPEN).startswith("half-closed")
    assert cause(UpstreamError("the last bytes were not taken"), 300, OPEN) == "the last bytes were not taken"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (12.4, "12 s"), (119.4, "119 s"), (119.6, "2 min")),
        *((299.7, "5 min"), (301, "5 min 1 s"), (599.7, "10 min"), (3599.8, "60 min"), (3601, "60 min")),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text
