"""What a client of the proxy is told of each error."""

from __future__ import annotations

import pytest

from agent.egress.refusals import reply_for, status_for
from shared.errors import (
    BadRequestError,
    DeniedError,
    DialError,
    HboneError,
    LimitError,
    StatusError,
    StreamResetError,
    UpstreamError,
)
from shared.http2.frames import CANCEL
from shared.net.socks import Reply


def late(error: HboneError) -> HboneError:
    between = UpstreamError("waited")
    between.__cause__ = TimeoutError()
    error.__cause__ = between
    return error


@pytest.mark.parametrize(
    ("error", "status", "reply"),
    [
        (BadRequestError("x"), 400, Reply.FAILED),
        (DeniedError("x"), 403, Reply.NOT_ALLOWED),
        (StatusError(400, "x"), 403, Reply.NOT_ALLOWED),
        (StatusError(401, "x"), 403, Reply.NOT_ALLOWED),
        (StatusError(403, "x"), 403, Reply.NOT_ALLOWED),
        (StatusError(404, "x"), 403, Reply.NOT_ALLOWED),
        (StatusError(429, "x"), 502, Reply.REFUSED),
        (StatusError(500, "x"), 502, Reply.REFUSED),
        (StatusError(503, "x"), 502, Reply.REFUSED),
        (StatusError(504, "x"), 504, Reply.HOST_UNREACHABLE),
        (LimitError("x", "y"), 503, Reply.FAILED),
        (DialError("x"), 502, Reply.NETWORK_UNREACHABLE),
        (late(DialError("x")), 504, Reply.NETWORK_UNREACHABLE),
        (UpstreamError("x"), 502, Reply.FAILED),
        (late(UpstreamError("x")), 504, Reply.FAILED),
        (StreamResetError("x", CANCEL), 502, Reply.FAILED),
        (HboneError("x"), 502, Reply.FAILED),
    ],
)
def test_what_is_told(error: HboneError, status: int, reply: Reply) -> None:
    assert (status_for(error), reply_for(error)) == (status, reply)


def test_a_timeout_is_found_where_only_the_context_tells_of_it() -> None:
    error = UpstreamError("x")
    error.__context__ = TimeoutError()
    assert status_for(error) == 504
