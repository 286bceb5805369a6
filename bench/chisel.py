"""chisel beside hbone: a tunnel for ssh by others, over a WebSocket, built from the Go module proxy.

ssh → chisel client → HAProxy, which ends TLS → chisel server → sshd
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import needs
from bench.subjects import DOMAIN, HAPROXY_DEFAULTS, NAMES, Subject, World, free_port, haproxy, running
from bench.tools import BenchError

VERSION = "1.11.3"

_MODULE = "github.com/jpillora/chisel"

_FRONT_END = f"""\
{HAPROXY_DEFAULTS}  timeout tunnel 1h
frontend service
  bind 127.0.0.1:{{port}} ssl crt {{pem}} alpn http/1.1
  default_backend server
backend server
  server server {{server}}
"""


def build() -> Path:
    """The program, built if it is not there yet. Raises BenchError if it cannot be built."""
    folder = needs.cache() / "chisel"
    program = folder / f"chisel-{VERSION}"
    if program.exists():
        return program
    if not needs.GO.is_there():
        raise BenchError(needs.GO.message())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text(f"module bench\n\ngo 1.24.0\n\nrequire {_MODULE} v{VERSION}\n")
    (folder / "tools.go").write_text(f'package bench\n\nimport _ "{_MODULE}"\n')
    made = folder / f"{program.name}.{os.getpid()}"
    done = subprocess.run(
        ["go", "build", "-mod=mod", "-trimpath", "-ldflags", "-s -w", "-o", made, _MODULE],
        cwd=folder,
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise BenchError(f"chisel cannot be built: {' '.join(last)}")
    made.replace(program)
    return program


@contextmanager
def server(world: World) -> Iterator[Subject]:
    """A chisel server behind a front end that ends TLS: the front end's address."""
    port = free_port()
    command = [str(build()), "server", "--host", "127.0.0.1", "--port", str(port)]
    with (
        running("chisel", command, {}, world, port) as behind,
        haproxy(world, _FRONT_END, server=behind.address) as front,
    ):
        yield front


def client(world: World, front_end: str, far: str) -> list[str]:
    """The command that connects its standard input and output to HOST:PORT `far` at the server's side."""
    name = f"{NAMES[0]}.{DOMAIN}"
    flags = ["--tls-ca", str(world.ca), "--sni", name, "--hostname", name]
    return [str(build()), "client", *flags, f"https://{front_end}", f"stdio:{far}"]
