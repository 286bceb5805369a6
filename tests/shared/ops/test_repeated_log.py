"""Lines that a peer can cause as often as it likes."""

from __future__ import annotations

import logging

import pytest

from shared.ops.repeated_log import RepeatedLog
from tests.shared.net.loopback import until

log = logging.getLogger("hbone.test")


async def test_the_first_is_told_at_once_and_the_others_together(caplog: pytest.LogCaptureFixture) -> None:
    repeated = RepeatedLog(log, every_s=0.02)
    for number in range(1, 5):
        repeated.warning("503", f"failure {number}")
    assert caplog.messages == ["failure 1"]
    await until(lambda: len(caplog.messages) > 1)
    assert caplog.messages == ["failure 1", "failure 4 (3 of these since the last line)"]
    repeated.close()


async def test_kinds_do_not_hide_each_other(caplog: pytest.LogCaptureFixture) -> None:
    repeated = RepeatedLog(log)
    for kind in ("502", "503", "502"):
        repeated.warning(kind, f"failure {kind}")
    assert caplog.messages == ["failure 502", "failure 503"]
    repeated.close()
    assert caplog.messages[2:] == ["failure 502 (1 of these since the last line)"]


async def test_after_a_pause_the_next_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    repeated = RepeatedLog(log, every_s=0.01)
    repeated.warning("503", "failure 1")
    await until(lambda: not repeated._kinds)
    repeated.warning("503", "failure 2")
    assert caplog.messages == ["failure 1", "failure 2"]
    repeated.close()


async def test_an_end_tells_what_has_been_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    repeated = RepeatedLog(log)
    for _ in range(1000):
        repeated.warning("503", "failure")
    repeated.close()
    repeated.close()
    assert caplog.messages == ["failure", "failure (999 of these since the last line)"]


async def test_what_is_over_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    repeated = RepeatedLog(log)
    for number in range(3):
        repeated.warning("503", f"failure {number}")
    repeated.forget("503")
    repeated.forget("502")
    repeated.warning("503", "failure again")
    repeated.close()
    assert caplog.messages == ["failure 0", "failure again"]
