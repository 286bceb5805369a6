"""Scrapes, read."""

from __future__ import annotations


def samples(scrape: bytes) -> dict[str, float]:
    """The number of each sample, by its name with its labels."""
    lines = (line for line in scrape.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines)}
