"""What is said at a registration: there and back, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tunnel import registration
from shared.tunnel.registration import MAX_REASON_CHARS, MAX_WORKERS, Verdict
from shared.tunnel.tunnel_request import target_name

PROCESS = "0123456789abcdef"


def test_the_request() -> None:
    assert registration.request("hello.demo", Verdict(PROCESS, 4)) == [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", b"hello.demo"),
        (b":path", b"/_hbone/reverse/registration"),
        (b"hbone-registration", b"accepted"),
        (b"hbone-process", PROCESS.encode()),
        (b"hbone-workers", b"4"),
    ]


def test_a_tunnel_cannot_have_its_path() -> None:
    assert target_name(registration.PATH) == ""


@given(
    st.builds(
        Verdict,
        st.integers(0, 2**64 - 1).map("{:016x}".format),
        st.integers(1, MAX_WORKERS),
        st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=300),
    )
)
def test_what_is_said_is_read(verdict: Verdict) -> None:
    assert registration.read(registration.request("a.b", verdict)) == verdict


def test_a_reason_is_one_visible_line() -> None:
    said = registration.request("a.b", Verdict(PROCESS, 1, "no\r\nhbone-workers: 9\x00é" + "x" * 1000))
    reason = dict(said)[b"hbone-reason"]
    assert reason.startswith(b"no??hbone-workers: 9??x")
    assert len(reason) == MAX_REASON_CHARS


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (b"hbone-registration", b"perhaps", "accepted or refused"),
        (b"hbone-process", b"0123", "16 hexadecimal digits"),
        (b"hbone-process", b"0123456789ABCDEF", "16 hexadecimal digits"),
        (b"hbone-workers", b"0", "must be in 1.."),
        (b"hbone-workers", b"257", "must be in 1.."),
        (b"hbone-workers", b"-1", "must be in 1.."),
        (b"hbone-workers", b"99999999999", "must be in 1.."),
    ],
)
def test_what_is_no_verdict(name: bytes, value: bytes, reason: str) -> None:
    headers = dict(registration.request("a.b", Verdict(PROCESS)))
    headers[name] = value
    with pytest.raises(ValueError, match=reason):
        registration.read(list(headers.items()))
    del headers[name]
    with pytest.raises(ValueError, match=reason):
        registration.read(list(headers.items()))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"hbone-registration", b"hbone-process", b"hbone-workers", b"hbone-reason"]),
            st.binary(max_size=400) | st.sampled_from([b"accepted", b"refused", PROCESS.encode(), b"2"]),
        )
    )
)
def test_anything_is_a_verdict_or_none(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        verdict = registration.read(headers)
    except ValueError:
        return
    assert 1 <= verdict.workers <= MAX_WORKERS
    assert verdict.refusal is None or verdict.refusal.isprintable()
