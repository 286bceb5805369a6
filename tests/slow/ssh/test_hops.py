"""Each hop of a session ends in the middle, and what the user then reads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.path.sshd import KINDS, lets_us_in
from tests.slow.ssh.places import URL, WAYS, Place, place
from tests.support.world import PATIENCE_S

pytestmark = lets_us_in

CONNECTION_FAILED = 255
"""ssh(1), "EXIT STATUS"."""

_HBONE = rf"hbone: {URL}: ended after [0-9.]+ s: "
_NO_MORE = r"client_loop: send disconnect: Broken pipe\n|Connection to \S+ closed by remote host\.\n"
"""ssh's own line about a connection that has ended, depending on whether it writes or reads first."""

ENDED = rf"(Read from remote host \S+: Connection reset by peer\n)?({_NO_MORE})"
IN_ORDER = r"Connection to \S+ closed by remote host\.\n"

DIRECTLY = {
    # The stand-in's way to say that the container has broken off; Cloud Run documents none.
    "krun": r"the target in the container broke off, or the container is stopping\? "
    r"\(reset with CONNECT_ERROR\)\n",
    "front end": r"the connection broke; has the container, or the network on the way, gone\? "
    r"\(connection to \S+ lost: \S.*\)\n",
    "network": r"no answer from hello\.a\.run\.app for 2 s; is the line down\?\n",
}
"""hbone's line, behind the URL and the tunnel's age; then comes ssh's."""

THROUGH_HGATE = {
    **dict.fromkeys(("krun", "front end", "hgate"), ENDED),
    # Nobody on the way to hgate asks for a sign of life but ssh.
    "network": r"Timeout, server \S+ not responding\.\n",
}
"""ssh's line: what has come to it is the end of a TCP connection, or nothing."""

CASES = [
    *((kind, way, hop) for kind in KINDS for way in WAYS for hop in ("krun", "front end", "network", "sshd")),
    *((kind, way, "hgate") for kind in KINDS for way in WAYS if WAYS[way].is_mesh),
]


def end(hop: str, here: Place, sshd: int) -> None:
    """As a crash does, or a network that goes away without a word."""
    match hop:
        case "sshd":
            os.kill(sshd, signal.SIGKILL)
        case "network":
            assert here.line is not None
            here.line.cut()
        case _:
            world = here.world
            world.kill({"krun": world.krun, "front end": world.cloudrun, "hgate": world.hgate}[hop])


# krun's own sshd is krun.
@pytest.mark.parametrize(
    ("kind", "way", "hop"), [case for case in CASES if (case[0], case[2]) != ("krun's own", "sshd")]
)
def test_what_the_user_reads(kind: str, way: str, hop: str, tmp_path: Path) -> None:
    flags = ("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3")
    pipe = subprocess.PIPE
    with place(kind, way, tmp_path, can_be_cut=hop == "network") as here:
        command = here.command("ssh", *flags, "hello", "echo $PPID; exec cat")
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                end(hop, here, int(process.stdout.readline()))
                assert process.wait(PATIENCE_S) == CONNECTION_FAILED
                read = process.stderr.read()
            finally:
                process.kill()
        if hop in ("krun", "front end") and here.way.is_mesh:
            # Why is for whoever reads hgate's log.
            told = here.world.hgate.wait_for(lambda record: "flags" in record and "error" in record)
            assert told["flags"] == "UPSTREAM_RESET"
    if hop == "sshd":
        expected = IN_ORDER
    else:
        expected = THROUGH_HGATE[hop] if here.way.is_mesh else f"{_HBONE}{DIRECTLY[hop]}{ENDED}"
    assert re.fullmatch(expected, read), read
