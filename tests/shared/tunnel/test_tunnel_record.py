"""The record of a tunnel, and which line it becomes."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from shared.address import Address
from shared.errors import DialError, HboneError, StreamResetError
from shared.ops.access_log import AccessLog
from shared.tunnel.tunnel_record import TunnelRecord


@dataclass
class Relayed:
    error: HboneError | None = None
    broken_downstream: bool = False
    sent_bytes: int = 3
    received_bytes: int = 4
    over: bool = True

    def abort(self, error: HboneError) -> None: ...

    def expire(self, error: HboneError) -> bool:
        return False


class Written:
    """An access log, and what has been written to it."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self.access_log = AccessLog(writer, "json", "test")
        os.close(writer)

    def line(self) -> dict[str, Any]:
        self.access_log.flush()
        line: dict[str, Any] = json.loads(os.read(self._reader, 10_000))
        del line["timestamp"], line["logger"], line["component"]
        return line

    def close(self) -> None:
        self.access_log.close()
        os.close(self._reader)


@pytest.fixture
async def written() -> AsyncIterator[Written]:
    written = Written()
    yield written
    written.close()


async def test_a_refusal_has_only_what_is_known(written: Written) -> None:
    record = TunnelRecord(peer="10.0.0.1:5")
    record.fail(DialError("no answer"), 0.5)
    record.write(written.access_log)
    assert written.line() == {
        "severity": "WARNING",
        "message": "connection refused",
        "src.addr": "10.0.0.1:5",
        "duration": 0.5,
        "flags": "CONNECT",
        "error": "no answer",
    }


async def test_a_tunnel_in_order(written: Written) -> None:
    record = TunnelRecord(peer="p:1", target=Address("::1", 22), name="", status=200, attempts=2, opened=True)
    record.end(Relayed(), 1.0)
    record.write(written.access_log)
    assert written.line() == {
        "severity": "INFO",
        "message": "connection complete",
        "src.addr": "p:1",
        "dst.addr": "[::1]:22",
        "tunnel.target": "",
        "status": 200,
        "attempts": 2,
        "bytes_sent": 3,
        "bytes_recv": 4,
        "duration": 1.0,
        "flags": "-",
    }


@pytest.mark.parametrize(
    ("downstream", "severity", "flag"),
    [(False, "ERROR", "UPSTREAM_RESET"), (True, "INFO", "DOWNSTREAM_RESET")],
)
async def test_whose_side_broke(written: Written, downstream: bool, severity: str, flag: str) -> None:
    record = TunnelRecord(peer="p:1", opened=True)
    record.end(Relayed(StreamResetError("reset", 8), broken_downstream=downstream), 1.0)
    record.write(written.access_log)
    line = written.line()
    assert (line["severity"], line["flags"], line["error"]) == (severity, flag, "reset")


async def test_a_registration_that_begins(written: Written) -> None:
    TunnelRecord(peer="p:1", sni="name", route="reverse").write_registered(written.access_log)
    line = written.line()
    assert (line["message"], line["sni"], line["flags"]) == ("workload registered", "name", "-")
