"""`hbone demo --mesh`, as a person runs it: in namespaces of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess

from shared.errors import EXIT_OK
from tests.mesh.run import RUNNING
from tests.mesh.workloads import SCRIPTS

PATIENCE_S = 60.0


def test_what_is_kept_running_answers_the_printed_line_and_leaves_nothing() -> None:
    environ = {name: value for name, value in os.environ.items() if name != RUNNING}
    command = [str(SCRIPTS / "hbone"), "demo", "--mesh", "--keep"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout
        try:
            said = ""
            for line in demo.stdout:
                if line.startswith("ip netns exec "):
                    break
                said += line
            asked = subprocess.run(line, shell=True, capture_output=True, timeout=PATIENCE_S, text=True)
            assert '"path": "/hello"' in asked.stdout, said + asked.stderr
            demo.send_signal(signal.SIGTERM)
            assert demo.wait(PATIENCE_S) == EXIT_OK
            assert demo.stdout.read() == "demo: everything arrived as it should\n"
        finally:
            demo.terminate()
    assert "the app is told of the client: spiffe://cluster.local/ns/clients/sa/web" in said
    assert "200 of 200 answered with 200" in said
    assert re.search(r"DENY applied: status 403 .*\[\d+\.\d ms\]", said)
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert line.split()[3] not in names
