"""Settings of krun about its sshd: who may log in, as whom, and which program serves.

SSH_AUTH is the original's name. The Secret `sshdebug` of the workload's namespace enables the sshd as well;
it is asked for where krun asks the cluster for something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from agent.config.kubernetes_settings import ACCESS, KubernetesSettings
from agent.config.variables import loopback
from shared import ports
from shared.address import Address
from shared.config.fields import Environment, setting, table_of
from shared.config.kinds import Choice, FolderPath, Parsed, Text, target

SshServer = Literal["auto", "openssh", "builtin", "none"]
"""Which sshd serves: see `SshSettings.server`."""

SERVERS: tuple[SshServer, ...] = get_args(SshServer)

SECRET = "sshdebug"
"""The original's."""

DEFAULT_LISTEN = Address("127.0.0.1", ports.SSHD)


def _keys(text: str) -> str:
    """Public keys, one a line, as they are written. Raises ValueError."""
    from agent.config.public_keys import parse_lines  # which few starts need

    parse_lines(text)
    return text


def _own_address(text: str) -> Address:
    """A loopback address that can be dialled as well. Raises ValueError."""
    target(text)
    return loopback("the sshd is reached by tunnels")(text)


@dataclass(frozen=True, slots=True)
class SshSettings:
    """All about the sshd. Without keys there is none."""

    auth: str = setting(
        Parsed(_keys, "public keys, one a line"),
        "",
        "public keys that may log in by ssh, one a line, as authorized_keys has them",
        f"They enable an sshd for /_hbone/22, as the Secret {SECRET} of the workload's namespace does, which "
        "is read if MESH, HBONE_MOUNTS, HBONE_ENV_FROM or HBONE_K8S_TOKENS name the cluster.",
        unset="none",
        variable="SSH_AUTH",
    )
    folder: Path | None = setting(
        FolderPath(),
        None,
        f"folder with the files that the Secret {SECRET} would have, which enables the sshd likewise",
        "For a secret that Cloud Run mounts. Changes count within a minute.",
        unset="none",
        variable="HBONE_SSH_FOLDER",
    )
    server: SshServer = setting(
        Choice(SERVERS),
        "auto",
        "which sshd serves where keys enable one: auto, openssh, builtin or none",
        "auto takes /usr/sbin/sshd of the image if it can serve, else the built-in one, for which hbone[ssh] "
        "has to be installed. None is started if HBONE_SSHD names another address.",
        variable="HBONE_SSH",
    )
    user: str = setting(
        Text(),
        "",
        "name or number of the user of ssh sessions",
        "If krun is root, it has to be said: root, or another user. If not, it can only be krun's own.",
        unset="krun's own, unless that is root",
        variable="HBONE_SSH_USER",
    )
    listen: Address = setting(
        Parsed(_own_address, "loopback HOST:PORT"),
        DEFAULT_LISTEN,
        "loopback address of krun's sshd",
        variable="HBONE_SSH_LISTEN",
    )
    other: Address | None = None
    """HBONE_SSHD, where it names another address: somebody else serves there."""

    namespace: str = ""
    """The workload's; empty: that of the access to the cluster."""

    access: Mapping[str, str] = field(default_factory=dict)
    """How the API server is reached, where MESH names no cluster: the values of ACCESS by variable."""

    asks_cluster: bool = False
    """Whether the Secret is looked for where MESH names no cluster."""


def read(read: Environment, sshd: Address | None, *, asks_cluster: bool) -> SshSettings:
    """The settings that `read` finds; `sshd` is HBONE_SSHD, None if it is not set. Raises UsageError."""
    given = read.given(SshSettings)
    listen = given.get("listen", DEFAULT_LISTEN)
    return SshSettings(
        other=None if sshd in (None, listen) else sshd,
        namespace=read(table_of(KubernetesSettings)["namespace"]),
        access={one.variable: text for one in ACCESS if (text := read(one))},
        asks_cluster=asks_cluster,
        **given,
    )
