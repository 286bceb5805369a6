"""How many files a process may open, where a limit is a thousand, and where it is none at all."""

from __future__ import annotations

import resource
import sys

import pytest

from shared import open_files, resource_limits


@pytest.mark.parametrize(
    ("platform", "hard", "allowed"),
    [
        ("linux", 1 << 20, 1 << 20),
        ("darwin", resource.RLIM_INFINITY, open_files.MACOS_MOST),
        ("darwin", 1 << 20, open_files.MACOS_MOST),
        ("darwin", 4096, 4096),
    ],
)
def test_as_many_as_the_machine_allows(
    monkeypatch: pytest.MonkeyPatch, platform: str, hard: int, allowed: int
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, hard))
    monkeypatch.setattr(resource_limits, "set_soft", lambda which, soft: told.append((which, soft)))
    assert open_files.allow_many() == allowed
    assert told == [(resource.RLIMIT_NOFILE, allowed)]
