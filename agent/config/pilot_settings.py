"""Settings of pilot-agent, which runs Envoy by istiod's configuration.

The names are Istio's and the original's: PROXY_CONFIG and ISTIO_BOOTSTRAP as pilot-agent itself reads them,
WORKLOAD_NAME and K_SERVICE for who we are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.config import certificate_settings
from agent.config.certificate_settings import CertificateSettings
from agent.config.kubernetes_settings import ISTIO_FILE, KubernetesSettings
from shared.address import Address
from shared.config.fields import Environment, Setting, setting, table_of
from shared.config.kinds import FilePath, Parsed, Text
from shared.credentials.kubernetes.kubernetes_names import DEFAULT_NAMESPACE, DEFAULT_SERVICE_ACCOUNT
from shared.errors import UnavailableError, UsageError

UID = 1337
"""Of Envoy in every pod with a sidecar: Istio's rules that capture traffic leave its traffic alone."""

PROGRAM = Path("/usr/local/bin/pilot-agent")
"""Where Istio's image has it."""

ENVOY_LEVELS = ("trace", "debug", "info", "warning", "error", "critical", "off")


def _proxy_config(text: str) -> Mapping[str, Any]:
    """Istio's ProxyConfig, in YAML or JSON."""
    import yaml  # 10 ms, for those who set it

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"no YAML{where}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError("no mapping of names to values")
    return found


def _label(text: str) -> str:
    """Kubernetes' rule for labels' values."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        raise ValueError("at most 63 letters, digits, -, . and _, with a letter or digit at both ends")
    return text


def _level(text: str) -> str:
    # Several: upstream:debug,connection:trace
    for word in text.split(","):
        if word.rpartition(":")[2] not in ENVOY_LEVELS:
            raise ValueError(f"{word[:40]!r} is no level of Envoy's")
    return text


@dataclass(frozen=True, slots=True)
class PilotSettings:
    """All about pilot-agent."""

    program: str = setting(
        Text(),
        "",
        "name or path of pilot-agent",
        unset=f"pilot-agent on PATH, then {PROGRAM}",
        variable="HBONE_PILOT_AGENT",
    )
    workload: str = setting(
        Text(),
        DEFAULT_SERVICE_ACCOUNT,
        "the workload's name in the mesh",
        "Its label app, which a Sidecar and policies select it by.",
        unset="K_SERVICE, which Cloud Run sets, else the service account",
        variable="WORKLOAD_NAME",
    )
    revision: str = setting(
        Parsed(_label, "value of a label"),
        "",
        "the workload's revision, which Cloud Run sets",
        "Its label service.istio.io/canonical-revision, by which telemetry tells revisions apart.",
        unset="none",
        variable="K_REVISION",
    )
    proxy_config: Mapping[str, Any] | None = setting(
        Parsed(_proxy_config, "YAML or JSON"),
        None,
        "Istio's ProxyConfig for pilot-agent",
        "What krun knows itself is added where it is not in there.",
        unset="none",
        variable="PROXY_CONFIG",
    )
    bootstrap: Path = setting(
        FilePath(),
        Path("/var/lib/istio/envoy/envoy_bootstrap_tmpl.json"),
        "template of Envoy's configuration for pilot-agent",
        variable="ISTIO_BOOTSTRAP",
    )
    log_level: str = setting(
        Parsed(_level, "level, or NAME:LEVEL with commas"),
        "warning",
        "what Envoy under pilot-agent logs",
        variable="ENVOY_LOG_LEVEL",
    )
    interception: str = "NONE"
    """How the app's connections get to Envoy, in Istio's words. With REDIRECT the mesh's services are behind
    ports of Envoy's own; with NONE it listens on each Service's port."""

    istiod: Address | None = None
    """XDS_ADDR, CA_ADDR or MCON_ADDR."""

    namespace: str = DEFAULT_NAMESPACE
    account: str = DEFAULT_SERVICE_ACCOUNT
    trust_domain: str = "cluster.local"
    cluster_id: str = "Kubernetes"
    token_file: Path = ISTIO_FILE
    """Of a token for the audience istio-ca, which krun keeps or kubelet."""

    kept_certificates: Path | None = None
    """The folder in which krun keeps the workload's certificate (HBONE_CA); None: pilot-agent gets its own
    from istiod's CA."""

    roots: Mapping[str, str] = field(default_factory=dict)
    """The mesh's roots in PEM, by the variable that has them."""

    root_files: tuple[Path, ...] = ()
    """HBONE_ROOTS."""

    passed: Mapping[str, str] = field(default_factory=dict)
    """Variables for pilot-agent itself, as they are set: their names begin as in PASSED."""

    instance: str = field(default_factory=lambda: os.urandom(4).hex(), compare=False)
    """Of all that run this revision, this one; by chance."""

    @property
    def pod(self) -> str:
        """The name of this instance in the mesh."""
        return f"{self.revision}-{self.instance}" if self.revision else self.workload

    @property
    def labels(self) -> dict[str, str]:
        """Those that krun gives the workload."""
        labels = {"app": self.workload, "service.istio.io/canonical-name": self.workload}
        return {**labels, "service.istio.io/canonical-revision": self.revision} if self.revision else labels

    def all_labels(self) -> dict[str, Any]:
        """Those that a pod of the workload would have: krun's, and over them those of ISTIO_METAJSON_LABELS.
        Raises UsageError if that has no JSON object."""
        text = self.passed.get(LABELS)
        return self.labels if text is None else self.labels | json_object(LABELS, text)


LABELS = "ISTIO_METAJSON_LABELS"
"""Istio's variable for the workload's labels, a JSON object."""


def json_object(name: str, text: str) -> dict[str, Any]:
    """The value of the variable `name`. Raises UsageError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"invalid {name} (has to be a JSON object)")
    return found


K_SERVICE = "K_SERVICE"

PASSED = ("ISTIO_META", "PILOT_", "PROXY_", "PEER_", "SECRET_", "GODEBUG", "GOMAXPROCS", "OUTPUT_CERTS", "TZ")
"""How names of variables begin that pilot-agent gets beside what krun says: Istio's own, and Go's. It gets no
others: the app's secrets are among them."""


def read(
    read: Environment, trust_domain: str, xds: Address | None, kubernetes: KubernetesSettings | None
) -> PilotSettings:
    """The settings that `read` finds. Raises UsageError."""
    given = read.given(PilotSettings)
    workload = table_of(KubernetesSettings)
    account = read(workload["service_account"])
    given["workload"] = given.get("workload") or read.text(K_SERVICE) or account
    return PilotSettings(
        istiod=xds or read(certificate_settings.CA_ADDR) or read(certificate_settings.MCON_ADDR),
        namespace=read(workload["namespace"]) or DEFAULT_NAMESPACE,
        account=account,
        trust_domain=trust_domain or "cluster.local",
        cluster_id=read(table_of(CertificateSettings)["cluster_id"]),
        token_file=(kubernetes.istio_file if kubernetes else None) or ISTIO_FILE,
        roots={one.variable: text for one in certificate_settings.ROOTS if (text := read(one))},
        root_files=read(table_of(CertificateSettings)["root_files"]),
        passed={
            name: text for name, text in read.environ.items() if text.strip() and name.startswith(PASSED)
        },
        **given,
    )


def find_program(named: str, search_path: str | None) -> Path | None:
    """pilot-agent: `named` (a name or a path) if given, else on `search_path` (as PATH; None: our own), else
    where Istio's image has it, else None. Raises UnavailableError when what `named` says is not there."""
    import shutil  # 2 ms, where there may be one

    found = shutil.which(named or PROGRAM.name, path=search_path)
    if named and found is None:
        raise UnavailableError(f"HBONE_PILOT_AGENT={named}: no such program")
    if found is not None:
        return Path(found)
    return PROGRAM if os.access(PROGRAM, os.X_OK) else None


def is_there(settings: PilotSettings, search_path: str) -> bool:
    """Whether there is a pilot-agent to be run."""
    try:
        return find_program(settings.program, search_path or None) is not None
    except UnavailableError:
        return False


def user() -> tuple[int, int] | None:
    """The user and group that pilot-agent runs as; None: ours."""
    return (UID, UID) if os.geteuid() == 0 else None


def check(settings: PilotSettings) -> None:
    """Raises UsageError if pilot-agent is to run, and what it cannot do without is not set."""
    if settings.istiod is None and "discoveryAddress" not in (settings.proxy_config or {}):
        raise UsageError(
            "HBONE_INBOUND=pilot-agent, but none of XDS_ADDR, CA_ADDR and MCON_ADDR is set: where is istiod?"
        )


SETTINGS: tuple[Setting[Any], ...] = tuple(table_of(PilotSettings).values())
