"""What `cluster:` in hgate's file can set: what objects of the cluster may ask for, and where the process
that reads them hands its lists over."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gateway.config.rule_settings import TRUE_OR_FALSE, patterns
from gateway.config.sections import CA_FILE, Context, Structure, Table, read_field, read_section
from gateway.config.yaml_nodes import Value
from gateway.rules.cluster_rules import ClusterRule
from shared import ports
from shared.address import MAX_PORT, Address
from shared.cluster.service_annotations import AUDIENCE, check_value
from shared.config.fields import Setting, setting
from shared.config.kinds import ADDRESS, FolderPath, Parsed, host_name, target
from shared.credentials.token_sources.token_settings import service_account
from shared.name_globs import MAX_STARS, compile_glob

DEFAULT_FOLDER = Path("/run/hgate")

DEFAULT_OPS = Address("0.0.0.0", ports.CLUSTER_OPS)
"""The kubelet and Prometheus ask from outside the pod."""

MAX_GATEWAYS = 16
"""Each is an endpoint of every Service."""

MAX_RULES = 1000
"""Each object that changes is held against all of them, in microseconds each."""


def _label_glob(text: str) -> str:
    if "." in text or "**" in text:
        raise ValueError("is a name, in which * stands for one or more characters, without dots")
    compile_glob(text)
    return text.lower()


def _host(text: str) -> str:
    host, colon, port = text.partition(":")
    compile_glob(host)
    if colon and not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= MAX_PORT):
        raise ValueError(f"the port must be 1..{MAX_PORT}")
    return text.lower()


def _project(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]{5,19}", text):
        raise ValueError("is a project's number, which its Cloud Run URLs have in them, not its ID")
    return text


def _hosts(value: Value, _: Context) -> tuple[str, ...]:
    return patterns(value, lambda item: item.parsed(_host))


def _projects(value: Value, _: Context) -> tuple[str, ...]:
    return patterns(value, lambda item: item.parsed(_project))


def _accounts(value: Value, _: Context) -> tuple[str, ...]:
    return patterns(value, lambda item: item.parsed(service_account))


def _services(value: Value, _: Context) -> tuple[str, ...]:
    return patterns(value, lambda item: item.parsed(_label_glob))


def _audience(text: str) -> str:
    if text.count("*") > MAX_STARS:
        raise ValueError(f"has more than {MAX_STARS} stars")
    return check_value(AUDIENCE, text)


def _audiences(value: Value, _: Context) -> tuple[str, ...]:
    return patterns(value, lambda item: item.parsed(_audience))


RULE: Table = {
    "namespace": Setting(
        Parsed(_label_glob, "glob", quoted=True),
        "",
        "namespaces that the entry is about",
        needed="",
    ),
    "hosts": Setting(
        Structure(_hosts, "list of globs"),
        (),
        "hosts of URLs that their objects may lead to",
        "* is a label or a part of one, ** one or more labels. HOST:PORT allows another port than 443.",
        unset="none",
    ),
    "projects": Setting(
        Structure(_projects, "list of numbers"),
        (),
        "projects to whose Cloud Run services they may lead",
        "By URLs with the project's number, SERVICE-NUMBER.REGION.run.app; older URLs have to be in hosts.",
        unset="none",
    ),
    "service_accounts": Setting(
        Structure(_accounts, "list of e-mail addresses"),
        (),
        "accounts whose tokens they may ask for, by impersonation",
        "The gateway's own account needs no entry.",
        unset="none",
    ),
    "services": Setting(
        Structure(_services, "list of globs"),
        (),
        "names of Services that clients from outside of the cluster may reach",
        "By names of the form outbound_.PORT_._.SERVICE.NAMESPACE.svc.DOMAIN, and with Istio's ALPN: hgate "
        "passes them to the Service's endpoints as they are.",
        unset="none",
    ),
    "audiences": Setting(
        Structure(_audiences, "list of globs"),
        (),
        "audiences that they may ask for tokens of",
        "* is one or more characters. The URLs that they may lead to need no entry.",
        unset="none",
    ),
    "ca": Setting(CA_FILE, None, "certificates to trust at hosts", unset="the system's"),
}


def _rules(value: Value, context: Context) -> tuple[ClusterRule, ...]:
    def read(item: Value) -> ClusterRule:
        given = item.mapping(tuple(RULE))
        inside = context.within(given)
        rule = ClusterRule(*(read_field(given, name, one, inside) for name, one in RULE.items()))
        if not (rule.hosts or rule.projects or rule.services or given.failed):
            item.refuse(item.error("allows nothing: needs hosts, projects or services"))
        return rule

    return tuple(value.each(MAX_RULES, read))


def _gateways(value: Value, _: Context) -> tuple[Address, ...]:
    return tuple(value.each(MAX_GATEWAYS, lambda item: item.parsed(_gateway), needed="address"))


def _gateway(text: str) -> Address:
    address = target(text, ports.SNI)
    if not address.is_ip:
        raise ValueError("must be an IP address: Istio looks up no name for the endpoints of a Service")
    return address


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """All of `cluster:`."""

    allow: tuple[ClusterRule, ...] = setting(
        Structure(_rules, "list of entries", RULE, each=True),
        (),
        "what objects of which namespaces may ask for",
        "What no entry allows is refused; the object says why.",
        needed="write allow: [] to refuse every object",
    )
    folder: Path = setting(
        FolderPath(),
        DEFAULT_FOLDER,
        "where hgate cluster writes its lists, and hgate reads them",
        restart=True,
    )
    domain: str = setting(
        Parsed(host_name, "name", quoted=True),
        "cluster.local",
        "the cluster's domain, the end of its Services' names",
        restart=True,
    )
    register: bool = setting(
        TRUE_OR_FALSE,
        True,
        "whether hgate cluster makes, for each routed Service, what leads clients of the mesh to hgate",
        "Nothing is made in a cluster without Istio.",
        unset="`true`",
        restart=True,
    )
    gateway: tuple[Address, ...] = setting(
        Structure(_gateways, "list of IP:PORT"),
        (),
        "hgate's addresses, for clients of the mesh",
        f"Without a port {ports.SNI} is meant.",
        unset="that of the load balancer of the Service internal-hgate, else the cluster's own of hgate",
    )
    mesh_env: bool = setting(
        TRUE_OR_FALSE,
        True,
        "whether hgate cluster keeps the ConfigMap mesh-env of istio-system, which krun reads",
        "It fills keys that are missing, and follows those that it has filled.",
        unset="`true`",
        restart=True,
    )
    ops: Address = setting(
        ADDRESS, DEFAULT_OPS, "port of hgate cluster for Prometheus and probes", restart=True
    )


def read(value: Value, context: Context) -> ClusterSettings:
    """The settings of the mapping `value`. Raises ConfigError."""
    return read_section(ClusterSettings, value, context)
