"""A mesh whose workloads have no port: hgate and krun as processes, krun dialling hgate, and certificates.

    client → hgate ← krun → its mTLS end → app

Owned here: starting, stopping and killing them. What clients and apps do is the tests'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hbone.demo.mesh import CLIENT_FILES, HOST, SNI, TRUST_DOMAIN
from hbone.demo.processes import Process
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.errors import EXIT_OK
from shared.trust.spiffe import SpiffeId
from tests.support.world import (
    CALLER,
    PATIENCE_S,
    WORKLOAD,
    Identity,
    count,
    find_envoy,
    free_port,
)

GATEWAY = SpiffeId.of_workload(TRUST_DOMAIN, "istio-system", "hgate")
OTHER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "other")

KEEPALIVE_S = 0.5

LONGEST_DRAIN_S = 15
"""Shorter than the patience of whoever stops a process."""


class ReverseWorld:
    """A mesh of which nothing runs yet; what is started ends with `block`."""

    def __init__(self, folder: Path, block: ExitStack) -> None:
        self.folder = folder
        self.mesh = Authority.create(TRUST_DOMAIN)
        self.gateway = Address("127.0.0.1", free_port())
        """Where hgate takes mTLS clients."""
        self.reverse = Address("127.0.0.1", free_port())
        """Where it takes workloads."""
        self._block = block
        self._started = 0
        for identity in (GATEWAY, WORKLOAD, OTHER, CALLER):
            names = (SNI, HOST) if identity is WORKLOAD else ()
            self.mesh.write(self.member(identity), self.mesh.issue(identity, dns_names=names))
        self.caller = Identity(*(self.member(CALLER) / file for file in CLIENT_FILES))

    def member(self, identity: SpiffeId) -> Path:
        """The folder of its certificates."""
        return self.folder / identity.path.strip("/").replace("/", "_")

    def hgate(self, *arguments: str, **reverse: Any) -> Process:
        """Starts one; `reverse` is for that section, beside or instead of what it has."""
        file = self.configure(**reverse)
        process = self._start(
            "hgate", ["-m", "gateway", "--config", str(file), "--log-format", "json", *arguments]
        )
        count(process, "all " if "--workers" in arguments else "ready", 1)
        return process

    def configure(self, **reverse: Any) -> Path:
        """Writes hgate's file."""
        file = self.folder / "hgate.yaml"
        file.write_text(json.dumps(self._configuration(**reverse)))
        return file

    def _configuration(self, **reverse: Any) -> dict[str, Any]:
        rule = {
            "from": [f"spiffe://{TRUST_DOMAIN}/ns/*/sa/*"],
            "names": ["{service_account}.{namespace}.svc.cluster.local"],
        }
        return {
            "listen": [str(self.gateway)],
            "admin": "off",
            "metrics": "off",
            "health": "off",
            "routes": [{"host": "*.demo.svc.cluster.local", "reverse": True}],
            "limits": {"drain_delay": 0, "drain_timeout": LONGEST_DRAIN_S - 5},
            "reverse": {
                "listen": [str(self.reverse)],
                "certificates": str(self.member(GATEWAY)),
                "keepalive": KEEPALIVE_S,
                "wait": "5s",
                "rules": [rule],
                **reverse,
            },
        }

    def krun(
        self,
        app: Address,
        *,
        inbound: str = "builtin",
        identity: SpiffeId = WORKLOAD,
        gateway: Address | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts one beside `app`, which has no port for tunnels and dials `gateway`, else hgate itself."""
        if inbound == "envoy":
            find_envoy()
        told = {
            "XDS_ADDR": "-",
            "HBONE_LISTEN": "-",
            "HBONE_STARTUP_PROBE": "-",
            "HBONE_REVERSE": str(gateway or self.reverse),
            "HBONE_REVERSE_NAME": HOST,
            "HBONE_REVERSE_PEER": str(GATEWAY),
            "HBONE_REVERSE_KEEPALIVE": str(KEEPALIVE_S),
            "HBONE_INBOUND": inbound,
            "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
            "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
            "HBONE_APP": str(app),
            "HBONE_CERTS": str(self.member(identity)),
            "HBONE_DRAIN_TIMEOUT": str(LONGEST_DRAIN_S - 5),
            "HBONE_LOG_FORMAT": "json",
        }
        return self._start("krun", ["-m", "agent"], {**told, **(environ or {})})

    def _start(self, name: str, arguments: list[str], environ: Mapping[str, str] | None = None) -> Process:
        self._started += 1
        process = Process(f"{name}-{self._started}", arguments, environ or {}, self.folder)
        self._block.callback(process.stop)
        return process


def registered(krun: Process, times: int = 1) -> None:
    """Returns when a krun has registered so many times."""
    count(krun, f"registered {HOST} with ", times)


def send(process: Process, signum: int) -> None:
    """Sends a signal."""
    os.kill(process._process.pid, signum)


def ends(process: Process) -> None:
    """Holds that a process ends by itself and in order."""
    assert process._process.wait(PATIENCE_S) == EXIT_OK
