"""What an answer to krun's own path says of the service, its front end and the container.

The front end is Google's, or one that stands for it. Its pages are told from an app's by their words, as its
headers are on every answer that passes through it (Cloud Run troubleshooting guide; pages seen in public
reports).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from shared.doctor.failures import Failed, Failure
from shared.doctor.far_text import one_line
from shared.http2.events import Headers
from shared.net.legs.stream import header_value, status_of
from shared.tunnel.tunnel_request import NO_TARGET

SKEW_S = 60.0
"""A difference between two clocks that is worth a word; tokens are accepted some minutes early or late."""

H2C_ONLY = b"krun, the port of the tunnels"
"""How krun's answer to HTTP/1.1 begins."""

_PROTOCOL_ERRORS = ("protocol error", "malformed response", "connection to the instance had an error")
_MANY = (
    (429, Failure.NO_INSTANCE),
    (500, Failure.SERVICE_ERROR),
    (502, Failure.CONTAINER_DOWN),
    (503, Failure.CONTAINER_DOWN),
    (504, Failure.CONTAINER_SLOW),
)
_BY_STATUS = dict(_MANY)


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer, of whose body the beginning is kept."""

    headers: Headers
    body: bytes
    secret: str | None
    """The token that was sent, which is not to be shown."""

    at_s: float
    """When it came, in seconds since 1970 by this machine's clock."""

    @property
    def status(self) -> int:
        """0 if it is no number."""
        return status_of(self.headers)

    def header(self, name: bytes) -> str:
        """The first value of a header; empty: there is none."""
        return header_value(self.headers, name).decode("latin-1")

    @property
    def line(self) -> str:
        """What it says, for people."""
        is_html = "html" in self.header(b"content-type")
        text = one_line(self.body, is_html=is_html, secret=self.secret)
        return f"answered {self.status}: {text}" if text else f"answered {self.status}"

    @property
    def skew_s(self) -> float | None:
        """By how many seconds this machine's clock is ahead of the front end's (RFC 9110 section 6.6.1).
        None: the answer has no date."""
        try:
            return self.at_s - parsedate_to_datetime(self.header(b"date")).timestamp()
        except (ValueError, OverflowError):
            return None

    @property
    def krun(self) -> Mapping[str, Any] | None:
        """What krun says of itself, empty for one that does not; None: it is not krun."""
        if self.status == 404 and NO_TARGET.encode() in self.body:
            return {}
        if self.status != 200 or not self.header(b"content-type").startswith("application/json"):
            return None
        try:
            told = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return told if isinstance(told, dict) and isinstance(told.get("krun"), str) else None


def answered(headers: Headers, body: bytes, secret: str | None) -> Answered:
    """An answer that has just come."""
    return Answered(headers, body, secret, time.time())


def skew_text(skew_s: float) -> str:
    """A difference of clocks in words."""
    return f"this machine's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"


def check_believed(answer: Answered) -> None:
    """Raises Failed if the token, or that there is none, is what the answer is about."""
    by_iap = _is_iap(answer)
    if by_iap or answer.status not in (401, 403):
        return
    if answer.secret is None:
        raise Failed(Failure.TOKEN_WANTED, answer.line)
    if answer.status == 401:
        skew_s = answer.skew_s
        if skew_s is not None and abs(skew_s) > SKEW_S:
            raise Failed(Failure.CLOCK_WRONG, f"{answer.line}; {skew_text(skew_s)}")
        raise Failed(Failure.TOKEN_REFUSED, answer.line)


def check_let_in(answer: Answered) -> None:
    """Raises Failed if the front end keeps us out because of where we come from, or knows no such service."""
    is_html = "html" in answer.header(b"content-type")
    if not is_html:
        return
    if answer.status == 404 and b"Error 404 (Not Found)!!1" in answer.body:
        raise Failed(Failure.NO_SERVICE, answer.line)
    if answer.status == 404 and b"Error: Page not found" in answer.body:
        raise Failed(Failure.INGRESS, answer.line)
    if answer.status == 403 and b"Access is forbidden" in answer.body:
        raise Failed(Failure.INGRESS, answer.line)


def check_passed_on(answer: Answered) -> None:
    """Raises Failed if the front end answers in the container's place."""
    status = answer.status
    if _is_iap(answer):
        raise Failed(Failure.IAP, _to(answer))
    if 300 <= status < 400:
        raise Failed(Failure.REDIRECTED, _to(answer))
    if status == 505 and H2C_ONLY in answer.body:
        raise Failed(Failure.HTTP1_TO_KRUN, answer.line)
    if status in (502, 503) and any(words in answer.line for words in _PROTOCOL_ERRORS):
        raise Failed(Failure.HTTP2_TO_HTTP1, answer.line)
    if status == 403:
        raise Failed(Failure.NOT_INVOKER, answer.line)
    if status in _BY_STATUS:
        raise Failed(_BY_STATUS[status], answer.line)
    if not 200 <= status < 300 and status not in (404, 405):
        raise Failed(Failure.OTHER_STATUS, answer.line)


def _is_iap(answer: Answered) -> bool:
    return bool(answer.header(b"x-goog-iap-generated-response")) or (
        300 <= answer.status < 400 and answer.header(b"location").startswith("https://accounts.google.com/")
    )


def _to(answer: Answered) -> str:
    location = one_line(answer.header(b"location").partition("?")[0].encode(), secret=answer.secret)
    return f"{answer.line}, to {location}" if location else answer.line
