"""What is handed to the exporting process: a line that fits, of sampled traces only, and never a wait."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.traces.samplers import sampler
from gateway.traces.spans import MAX_LINE_BYTES, SpanPipe, Spans
from shared.errors import Flag, HboneError, NoRouteError
from shared.tunnel.tunnel_record import MAX_PHASES, TunnelRecord

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"


@pytest.fixture
def pipe() -> Iterator[SpanPipe]:
    pipe = SpanPipe.open()
    yield pipe
    pipe.close()


def spans_of(pipe: SpanPipe, name: str = "parentbased_always_on") -> Spans:
    return Spans(pipe.write_end, sampler(name, "1"), now=lambda: 1000.0)


def told(pipe: SpanPipe) -> list[dict[str, Any]]:
    """What is in the pipe."""
    try:
        return [json.loads(line) for line in os.read(pipe.read_end, 1 << 20).splitlines()]
    except BlockingIOError:
        return []


async def test_a_span_has_the_ids_that_the_request_has_had(pipe: SpanPipe) -> None:
    record = TunnelRecord("127.0.0.1:5", "name", traceparent=SAMPLED, duration_s=2.0, setup_s=0.5)
    spans_of(pipe).finished(record)
    (span,) = told(pipe)
    assert (span["trace"], span["span"]) == tuple(SAMPLED.split("-")[1:3])
    assert "parent" not in span
    assert (span["end"], span["duration"], span["setup"]) == (1000.0, 2.0, 0.5)


async def test_a_peer_s_span_is_the_parent(pipe: SpanPipe) -> None:
    record = TunnelRecord("127.0.0.1:5", traceparent=SAMPLED, traced_by_peer=True)
    spans_of(pipe).finished(record)
    (span,) = told(pipe)
    assert (span["trace"], span["parent"]) == tuple(SAMPLED.split("-")[1:3])
    assert span["span"] != span["parent"]


@pytest.mark.parametrize(
    ("name", "traceparent", "count"),
    [
        ("parentbased_always_on", UNSAMPLED, 0),
        ("always_on", UNSAMPLED, 1),
        ("parentbased_always_off", SAMPLED, 1),
        ("always_off", SAMPLED, 0),
        ("always_off", None, 0),
        ("always_on", None, 1),
    ],
)
async def test_who_decides(pipe: SpanPipe, name: str, traceparent: str | None, count: int) -> None:
    record = TunnelRecord("127.0.0.1:5", traceparent=traceparent, traced_by_peer=traceparent is not None)
    spans_of(pipe, name).finished(record)
    assert len(told(pipe)) == count


def test_the_request_tells_on_whether_its_trace_is_sampled(pipe: SpanPipe) -> None:
    assert next(spans_of(pipe).traceparents()).endswith(b"-01")
    assert next(spans_of(pipe, "always_off").traceparents()).endswith(b"-00")


@pytest.mark.parametrize(
    ("flag", "failed"), [(Flag.NO_ROUTE, True), (Flag.DOWNSTREAM_RESET, False), (Flag.LIFETIME, False)]
)
async def test_a_client_that_breaks_off_is_no_failure(pipe: SpanPipe, flag: Flag, failed: bool) -> None:
    record = TunnelRecord("127.0.0.1:5")
    record.fail(HboneError("why"), 0.1)
    record.flag = flag
    spans_of(pipe).finished(record)
    (span,) = told(pipe)
    assert span.get("failed", False) is failed
    assert span["flags"] == flag.value


async def test_a_full_pipe_drops_and_counts_and_does_not_wait(pipe: SpanPipe) -> None:
    spans, record = spans_of(pipe), TunnelRecord("127.0.0.1:5", "x" * 200)
    began = time.monotonic()
    for _ in range(20_000):
        spans.finished(record)
    assert time.monotonic() - began < 10
    assert 10_000 < spans.dropped < 20_000
    kept = 20_000 - spans.dropped
    found = 0
    while lines := told(pipe):
        assert all(line["sni"] == record.sni for line in lines)
        found += len(lines)
        if found == kept:
            break
    assert found == kept, "whole lines only"
    spans.finished(record)
    assert spans.dropped == 20_000 - kept, "there is room again"


async def test_nobody_there_any_more() -> None:
    pipe = SpanPipe.open()
    os.close(pipe.read_end)
    spans = spans_of(pipe)
    spans.finished(TunnelRecord("127.0.0.1:5"))
    assert spans.dropped == 1
    os.close(pipe.write_end)


TEXTS = st.text(max_size=3000)


@given(st.tuples(TEXTS, TEXTS, TEXTS, TEXTS), st.integers(0, 40))
def test_every_line_fits_or_is_counted(texts: tuple[str, str, str, str], phases: int) -> None:
    """Names come from clients, errors from services."""
    sni, route, identity, why = texts

    async def write() -> None:
        pipe = SpanPipe.open()
        spans = spans_of(pipe)
        record = TunnelRecord("127.0.0.1:5", sni, route, identity=identity, phases=[])
        for _ in range(phases):
            record.waited("look-up", 1e6 + 0.123456789, 1e6 + 7.123456789)
        assert len(record.phases or ()) <= MAX_PHASES
        record.fail(NoRouteError(why), 0.1)
        spans.finished(record)
        lines = told(pipe)
        assert len(lines) + spans.dropped == 1
        if all(text.isascii() and text.isprintable() for text in texts):
            assert lines, "no such line is too long"
        pipe.close()

    asyncio.run(write())


def test_the_bound_of_a_line_is_what_a_pipe_takes_in_one_piece() -> None:
    assert os.pathconf("/", "PC_PIPE_BUF") == MAX_LINE_BYTES
