"""Which tunnels have a span: the samplers of OpenTelemetry's specification ("Tracing SDK", Sampling).

Our own arithmetic, as the decision is made before the tunnel request is sent, whose traceparent tells it on.
"""

from __future__ import annotations

from dataclasses import dataclass

_RATIOS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""Shares of new traces; None: OTEL_TRACES_SAMPLER_ARG says it."""

_BY_PARENT = "parentbased_"

SAMPLERS = (*_RATIOS, *(f"{_BY_PARENT}{name}" for name in _RATIOS))
"""All names of OTEL_TRACES_SAMPLER that we know."""

_LOW_BITS = 64


@dataclass(frozen=True, slots=True)
class Sampler:
    """Decides by the trace's id alone, so that all who have the same ratio decide alike."""

    bound: int
    """Of the lower 64 bits of the trace's id: those below it are sampled."""
    by_parent: bool
    """Where somebody else began the trace, its decision holds."""

    def takes(self, trace: str) -> bool:
        """Whether a trace of our own is sampled; `trace` is its id, 32 hexadecimal digits."""
        return int(trace[-_LOW_BITS // 4 :], 16) < self.bound

    def takes_child(self, trace: str, parent_sampled: bool) -> bool:
        """The same for a trace that somebody else began."""
        return parent_sampled if self.by_parent else self.takes(trace)


def sampler(name: str, argument: str) -> Sampler:
    """The sampler called `name`, one of SAMPLERS; `argument` is the ratio of those that take one. Raises
    ValueError if that is none."""
    ratio = _RATIOS[name.removeprefix(_BY_PARENT)]
    if ratio is None:
        ratio = _ratio(argument)
    return Sampler(round(ratio * (1 << _LOW_BITS)), name.startswith(_BY_PARENT))


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ValueError("must be a number from 0 to 1")
    return ratio
