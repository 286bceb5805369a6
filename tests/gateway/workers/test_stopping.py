"""Requests to stop: which signals are one, and which are two."""

from __future__ import annotations

import signal

from gateway.workers.stopping import SAME_REQUEST_S, StopRequests


def test_a_signal_that_is_passed_on_is_the_same_request() -> None:
    requests = StopRequests()
    assert requests.count == 0
    assert requests.add(signal.SIGINT, 100.0)
    assert not requests.add(signal.SIGTERM, 100.0 + SAME_REQUEST_S / 2)
    assert (requests.count, requests.signal) == (1, signal.SIGINT)


def test_a_later_one_is_another() -> None:
    requests = StopRequests()
    requests.add(signal.SIGTERM, 0.0)
    assert requests.add(signal.SIGINT, SAME_REQUEST_S)
    assert (requests.count, requests.signal) == (2, signal.SIGINT)
    assert not requests.add(signal.SIGTERM, SAME_REQUEST_S * 1.5), "counted from the latest"
