"""Lines of hgate and krun about the same tunnel, found by its traceparent."""

from __future__ import annotations

from pathlib import Path

from shared.ops.access_log import LOGGER as ACCESS_LOGGER
from tests.path.app import App, lasting
from tests.path.tls_client import connected
from tests.support.world import PATIENCE_S, running


def test_krun_s_line_has_the_traceparent_that_hgate_sent(tmp_path: Path) -> None:
    with App(lasting(b"hello\n")) as app, running(tmp_path, inbound="builtin", app=app.address) as world:
        for _ in "12":
            with connected(world) as connection:
                assert connection.recv(100) == b"hello\n"
        traces: set[str] = set()
        for number in (1, 2):
            gateway = world.hgate.wait_for(
                lambda record: record.get("logger") == ACCESS_LOGGER and record["traceparent"] not in traces,
                PATIENCE_S,
            )
            trace = gateway["traceparent"]
            traces.add(trace)
            agent = world.krun.wait_for(
                lambda record, trace=trace: record.get("traceparent") == trace,  # type: ignore[misc]  # lambda's default
                PATIENCE_S,
            )
            assert (agent["tunnel.target"], agent["logger"]) == ("15003", ACCESS_LOGGER)
            assert (agent["bytes_sent"], agent["bytes_recv"]) == (
                gateway["bytes_sent"],
                gateway["bytes_recv"],
            )
            for line in (gateway, agent):
                assert isinstance(line["duration"], float) and 0 < line["duration"] < PATIENCE_S
            assert len(traces) == number
