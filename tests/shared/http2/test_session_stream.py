"""The record of a stream: what a body may still bring."""

from __future__ import annotations

import pytest

from shared.http2.session_stream import Awaited, SessionStream


def stream(content_length: int | None) -> SessionStream:
    made = SessionStream(1, 0, 0, 0)
    if content_length is not None:
        made.await_body(content_length)
    return made


def test_a_body_without_a_promise_may_bring_anything() -> None:
    assert stream(None).count_body(1 << 40, ends=False)
    assert stream(None).count_body(0, ends=True)


def test_a_body_brings_what_was_promised_and_then_ends() -> None:
    body = stream(5)
    assert body.count_body(3, ends=False)
    assert body.count_body(2, ends=False)
    assert body.count_body(0, ends=True)
    assert not stream(5).count_body(6, ends=False)
    assert not stream(5).count_body(4, ends=True)
    assert not stream(0).count_body(1, ends=True)


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"CONNECT"])
def test_nothing_comes_before_the_answer(method: bytes) -> None:
    asked = SessionStream(1, 0, 0, 0)
    asked.await_response(method)
    assert asked.awaited.is_response
    assert not asked.count_body(0, ends=True)
    assert not asked.count_body(1, ends=False)


@pytest.mark.parametrize(
    ("method", "status", "awaited"),
    [
        (b"GET", b"200", Awaited.COUNTED_BODY),
        (b"GET", b"304", Awaited.BODY),
        (b"CONNECT", b"200", Awaited.BODY),
    ],
)
def test_what_content_length_means_in_a_response(method: bytes, status: bytes, awaited: Awaited) -> None:
    asked = SessionStream(1, 0, 0, 0)
    asked.await_response(method)
    asked.response_came(status, 7)
    assert asked.awaited is awaited


def test_a_response_to_head_has_no_body() -> None:
    asked = SessionStream(1, 0, 0, 0)
    asked.await_response(b"HEAD")
    asked.response_came(b"200", 7)
    assert not asked.count_body(1, ends=False)
    assert asked.count_body(0, ends=True)
