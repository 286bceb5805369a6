"""Our samplers decide as OpenTelemetry's own do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import sampling

from gateway.traces.samplers import SAMPLERS, sampler

TRACES = st.integers(1, (1 << 128) - 1)


@given(TRACES, st.floats(0, 1))
def test_a_ratio_takes_the_traces_that_the_sdk_takes(trace: int, ratio: float) -> None:
    theirs = sampling.TraceIdRatioBased(ratio).should_sample(None, trace, "tunnel")
    sampled = theirs.decision is sampling.Decision.RECORD_AND_SAMPLE
    assert sampler("traceidratio", repr(ratio)).takes(f"{trace:032x}") is sampled


@given(TRACES)
def test_all_or_none(trace: int) -> None:
    assert sampler("always_on", "").takes(f"{trace:032x}")
    assert not sampler("always_off", "").takes(f"{trace:032x}")


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_parent_decides_only_where_the_name_says_so(name: str) -> None:
    made, trace = sampler(name, "0.5"), f"{1 << 127:032x}"
    for sampled in (True, False):
        expected = sampled if name.startswith("parentbased_") else made.takes(trace)
        assert made.takes_child(trace, sampled) is expected


def test_their_names_are_the_specification_s() -> None:
    assert set(SAMPLERS) == set(sampling._KNOWN_SAMPLERS)


@pytest.mark.parametrize("ratio", ["", "x", "-0.1", "1.1", "nan", "inf"])
def test_what_is_no_ratio(ratio: str) -> None:
    with pytest.raises(ValueError, match="must be a number from 0 to 1"):
        sampler("traceidratio", ratio)
