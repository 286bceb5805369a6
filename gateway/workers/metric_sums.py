"""The metrics of several workers as those of one gateway.

Counters and histograms are summed, and never fall: what a worker had counted in its last response stays in
the sum when the worker is gone. Gauges are summed over the workers that respond. Exceptions are those that
say since when something is so, or whether it is: the least of them counts, because it is the worst. Of ages
the greatest counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_ACCUMULATED = frozenset({"counter", "histogram"})

_LEAST = ("_created", "_timestamp_seconds", "_start_time_seconds", "_successful", "_max_fds", "_build")
"""Ends of the names of samples that are not summed."""

_GREATEST = ("_age_seconds",)
"""Likewise."""

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Family:
    """One metric with its samples."""

    name: str
    documentation: str
    type: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def encode(metrics: Iterable[Metric]) -> bytes:
    """A worker's response."""
    return json.dumps(
        [
            [
                metric.name,
                metric.documentation,
                metric.type,
                [[sample.name, list(sample.labels.items()), sample.value] for sample in metric.samples],
            ]
            for metric in metrics
        ],
        separators=(",", ":"),
    ).encode()


def decode(response: bytes) -> list[Family]:
    """What `encode` was given. Raises ValueError if `response` is nothing of it."""
    try:
        return [
            Family(
                name,
                documentation,
                type,
                {
                    (sample, tuple((k, v) for k, v in labels)): float(value)
                    for sample, labels, value in samples
                },
            )
            for name, documentation, type, samples in json.loads(response)
        ]
    except TypeError as error:
        raise ValueError(f"no metrics: {error}") from error


class Sums(Collector):
    """The sum over all workers."""

    def __init__(self) -> None:
        self.restarts = 0
        """Workers that have replaced a dead one."""
        self._pids: dict[int, int] = {}
        self._last: dict[int, list[Family]] = {}
        self._gone: dict[str, Family] = {}
        self._silent: set[int] = set()

    def update(self, worker: int, pid: int, families: list[Family]) -> None:
        """Keeps the metrics of worker number `worker`, which is process `pid`."""
        if self._pids.setdefault(worker, pid) != pid:
            self._pids[worker] = pid
            self.restarts += 1
            _add(self._gone, self._last[worker], accumulated_only=True)
        self._last[worker] = families
        self._silent.discard(worker)

    def no_response(self, worker: int) -> None:
        """The worker has not responded: its counters still count, its gauges do not."""
        self._silent.add(worker)

    def collect(self) -> Iterator[Metric]:
        """The metrics of all workers together."""
        total: dict[str, Family] = {}
        for worker, families in self._last.items():
            _add(total, families, accumulated_only=worker in self._silent)
        _add(total, self._gone.values(), accumulated_only=True)
        for family in total.values():
            metric = Metric(family.name, family.documentation, family.type)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric


def _add(total: dict[str, Family], families: Iterable[Family], *, accumulated_only: bool) -> None:
    for family in families:
        if accumulated_only and family.type not in _ACCUMULATED:
            continue
        into = total.get(family.name)
        if into is None:
            into = total[family.name] = Family(family.name, family.documentation, family.type)
        _add_samples(into.samples, family.samples)


def _add_samples(into: dict[tuple[str, Labels], float], more: Mapping[tuple[str, Labels], float]) -> None:
    for key, value in more.items():
        known = into.get(key)
        if known is None:
            into[key] = value
        elif key[0].endswith(_LEAST):
            into[key] = min(known, value)
        elif key[0].endswith(_GREATEST):
            into[key] = max(known, value)
        else:
            into[key] = known + value
