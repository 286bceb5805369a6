"""What a client of the proxy is told of an error: an HTTP status, or a reply of SOCKS. No I/O."""

from __future__ import annotations

from http import HTTPStatus

from shared.errors import BadRequestError, DialError, HboneError, LimitError, RefusedError, StatusError
from shared.net.socks import Reply

NOT_ALLOWED = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
    }
)
"""Answers of the gateway that another attempt does not change: its rules refuse, or the port is forbidden.
401 would make a client of the proxy ask for a password."""


def status_for(error: HboneError) -> int:
    """The status of the proxy's answer."""
    if isinstance(error, StatusError):
        if error.status in NOT_ALLOWED:
            return HTTPStatus.FORBIDDEN
        return (
            HTTPStatus.GATEWAY_TIMEOUT
            if error.status == HTTPStatus.GATEWAY_TIMEOUT
            else HTTPStatus.BAD_GATEWAY
        )
    if isinstance(error, BadRequestError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, LimitError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, RefusedError):
        return HTTPStatus.FORBIDDEN
    return HTTPStatus.GATEWAY_TIMEOUT if is_timeout(error) else HTTPStatus.BAD_GATEWAY


def reply_for(error: HboneError) -> Reply:
    """SOCKS' reply (RFC 1928 section 6)."""
    status = status_for(error)
    if status == HTTPStatus.FORBIDDEN:
        return Reply.NOT_ALLOWED
    if isinstance(error, StatusError):
        # The gateway is there, and could not connect the target.
        return Reply.HOST_UNREACHABLE if status == HTTPStatus.GATEWAY_TIMEOUT else Reply.REFUSED
    return Reply.NETWORK_UNREACHABLE if isinstance(error, DialError) else Reply.FAILED


def is_timeout(error: BaseException | None) -> bool:
    """Whether `error` is about something that was not there in time."""
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__ or error.__context__  # compiled modules tell the second only
    return False
