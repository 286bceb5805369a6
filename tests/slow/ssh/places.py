"""A path to a sshd, and ssh's settings for it, as a user's file has them: host `hello`.

`directly`: ssh → hbone → Cloud Run's front end → krun → sshd, as `/_hbone/22`.
`through hgate`: ssh → an Envoy beside it, which speaks the mesh's mTLS → hgate, by SNI → the front end →
krun → the mTLS end → sshd, as the app of the service.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hbone.demo.mesh import SERVICE_URL
from shared.address import Address
from tests.path.programs import client_envoy
from tests.path.sshd import KINDS
from tests.support.cut_line import CutLine, line_to
from tests.support.world import World, find_program, running

HBONE = Path(sys.executable).with_name("hbone")
URL = f"{SERVICE_URL}/_hbone/22"

_SETTINGS = """\
Host hello
  User {user}
  IdentityFile {user_key}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  HostKeyAlias container
  BatchMode yes
  ControlPath none
"""


@dataclass(frozen=True, slots=True)
class Way:
    """How ssh gets to the sshd."""

    is_mesh: bool
    inbound: str
    """What ends the mTLS in the container."""


WAYS = {
    "directly": Way(False, "none"),
    "through hgate to Envoy": Way(True, "envoy"),
    "through hgate to the built-in end": Way(True, "builtin"),
}

PLACES = [(kind, way) for kind in KINDS for way in WAYS]


@dataclass(frozen=True, slots=True)
class Place:
    """One of PLACES, running."""

    way: Way
    config: Path
    world: World
    line: CutLine | None = None
    """The network between the user's machine and the rest, if it is to be cut."""

    def command(self, name: str, *words: str | Path) -> list[str]:
        """ssh, scp or sftp with the settings for `hello`."""
        return [find_program(name), "-F", str(self.config), *map(str, words)]

    def ssh(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Runs ssh to its end."""
        return subprocess.run(self.command("ssh", *words), input=stdin, capture_output=True, timeout=100)


@contextmanager
def place(kind: str, way_name: str, folder: Path, *, can_be_cut: bool = False) -> Iterator[Place]:
    """Runs it in `folder` until the block ends. A line that can be cut turns RST into silence."""
    way = WAYS[way_name]
    with ExitStack() as block:
        sshd = block.enter_context(KINDS[kind](folder))
        environ = {**sshd.environ, "HBONE_DRAIN_TIMEOUT": "0.1"}
        world = block.enter_context(running(folder, inbound=way.inbound, app=sshd.address, environ=environ))
        entry = world.gateway if way.is_mesh else world.front_end
        line = block.enter_context(line_to(entry)) if can_be_cut else None
        near = line.address if line else entry
        if way.is_mesh:
            sidecar = block.enter_context(client_envoy(near, world.caller, folder))
            way_there = f"  HostName {sidecar.host}\n  Port {sidecar.port}\n"
        else:
            way_there = f"  ProxyCommand {_proxy_command(world, near)}\n"
        config = folder / "ssh_config"
        settings = _SETTINGS.format(user=sshd.user, user_key=sshd.user_key, folder=folder)
        config.write_text(settings + way_there)
        (folder / "known_hosts").write_text(sshd.known_as("container"))
        yield Place(way, config, world, line)


def _proxy_command(world: World, front_end: Address) -> str:
    flags = f"--keepalive 1 --ca {world.front_end_ca} --connect {front_end}"
    return f"env GCE_METADATA_HOST={world.metadata} {HBONE} {flags} {URL}"
