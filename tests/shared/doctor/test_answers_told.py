"""What an answer says of the service, its front end and the container."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.doctor.answers_told import (
    Answered,
    answered,
    check_believed,
    check_let_in,
    check_passed_on,
    skew_text,
)
from shared.doctor.failures import Failed, Failure

CHECKS: tuple[Callable[[Answered], None], ...] = (check_believed, check_let_in, check_passed_on)
HTML = (b"content-type", b"text/html; charset=UTF-8")


def answer(
    status: int, body: bytes = b"", *headers: tuple[bytes, bytes], token: str | None = "a-token-of-ours"
) -> Answered:
    return answered([(b":status", str(status).encode()), *headers], body, token)


def found(one: Answered) -> Failure | None:
    """The first failure that the hops find, in their order."""
    for check in CHECKS:
        try:
            check(one)
        except Failed as failed:
            return failed.failure
    return None


@pytest.mark.parametrize(
    ("one", "failure"),
    [
        (answer(200), None),
        (answer(204), None),
        (answer(404, b"no such target; known are 15003, 22"), None),
        (answer(401), Failure.TOKEN_REFUSED),
        (answer(401, token=None), Failure.TOKEN_WANTED),
        (answer(403, token=None), Failure.TOKEN_WANTED),
        (answer(403), Failure.NOT_INVOKER),
        (answer(403, b"<h1>Error: Forbidden</h1><h2>Access is forbidden.</h2>", HTML), Failure.INGRESS),
        (answer(404, b"<h1>Error: Page not found</h1>", HTML), Failure.INGRESS),
        (answer(404, b"<title>Error 404 (Not Found)!!1</title>", HTML), Failure.NO_SERVICE),
        # Flask's own page is an app's.
        (answer(404, b"<h1>Not Found</h1><p>The requested URL was not found on the server.", HTML), None),
        (answer(401, b"", (b"x-goog-iap-generated-response", b"true")), Failure.IAP),
        (answer(302, b"", (b"location", b"https://accounts.google.com/x?y")), Failure.IAP),
        (answer(307, b"", (b"location", b"https://elsewhere.example/")), Failure.REDIRECTED),
        (answer(429, b"Rate exceeded."), Failure.NO_INSTANCE),
        (answer(500), Failure.SERVICE_ERROR),
        (answer(503, b"Service Unavailable"), Failure.CONTAINER_DOWN),
        (
            answer(503, b"upstream connect error or disconnect. reset reason: protocol error"),
            Failure.HTTP2_TO_HTTP1,
        ),
        (answer(502, b"The request failed because of a malformed response"), Failure.HTTP2_TO_HTTP1),
        (answer(504), Failure.CONTAINER_SLOW),
        (answer(505, b"krun, the port of the tunnels: it accepts ..."), Failure.HTTP1_TO_KRUN),
        (answer(505, b"an app's"), Failure.OTHER_STATUS),
        (answer(431), Failure.OTHER_STATUS),
    ],
)  # fmt: skip
def test_a_failure_by_its_answer(one: Answered, failure: Failure | None) -> None:
    assert found(one) is failure


JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("one", "krun"),
    [
        (answer(200, b'{"krun": "1"}', JSON), {"krun": "1"}),
        (answer(404, b"no such target; known are 22"), {}),
        (answer(200, b'{"krun": 1}', JSON), None),
        (answer(200, b'["krun"]', JSON), None),
        (answer(200, b'{"krun"', JSON), None),
        (answer(200, b"[" * 4000, JSON), None),
        (answer(200, b'{"krun": "1"}'), None),
        (answer(404, b"not found"), None),
    ],
)
def test_who_is_krun(one: Answered, krun: object) -> None:
    assert one.krun == krun


def test_a_redirect_is_told_without_its_query() -> None:
    one = answer(302, b"", (b"location", b"https://accounts.google.com/o?client_id=1&state=secret"))
    with pytest.raises(Failed, match=r"^answered 302, to https://accounts\.google\.com/o$"):
        check_passed_on(one)


def test_clocks_in_words() -> None:
    assert skew_text(61.2) == "this machine's clock is 61 s ahead"
    assert skew_text(-90) == "this machine's clock is 90 s behind"
    assert answer(200, b"", (b"date", b"no date")).skew_s is None
    assert answer(200).skew_s is None


@given(st.integers(100, 599), st.binary(max_size=300), st.binary(max_size=40), st.binary(max_size=40))
def test_any_answer_can_be_judged(status: int, body: bytes, kind: bytes, date: bytes) -> None:
    one = answer(status, body, (b"content-type", kind), (b"date", date), (b"location", date))
    found(one)
    assert one.krun is None or isinstance(one.krun, dict)
    assert one.skew_s is None or isinstance(one.skew_s, float)
    assert one.line.isprintable()
