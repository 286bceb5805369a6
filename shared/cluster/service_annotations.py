"""The words that objects of a cluster and hgate have for each other: annotations, labels, field managers.

A Service with `hbone.dev/cloudrun-url` asks hgate for a way to a service outside of the cluster. Whoever
writes one (`hbone register`) and whoever reads it (`hgate cluster`) have the names and the forms from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shared.address import MAX_PORT, check_host_name
from shared.ports import HBONE, HTTPS, INBOUND_MTLS

PREFIX = "hbone.dev/"

ORIGINAL_LABEL = "mesh-cloudrun"
"""The original's: on a Service with the name in the URL, its value is the service's own name."""

URL = f"{PREFIX}cloudrun-url"
"""https://HOST, or https://HOST:PORT, of the service outside."""

AUDIENCE = f"{PREFIX}audience"
"""Of hgate's token; the URL, unless it is set."""

ACCOUNT = f"{PREFIX}service-account"
"""E-mail address of the Google service account whose token hgate sends, by impersonation."""

TARGET_PORT = f"{PREFIX}target-port"
"""Behind `/_hbone/` in the tunnel's request: a port, or the name of a target."""

METHOD = f"{PREFIX}method"
"""POST or CONNECT."""

WORKLOAD = f"{PREFIX}workload"
"""The label `app` of the workload outside, which krun gives it by WORKLOAD_NAME; the Service's own name,
unless it is set."""

WORKLOAD_ACCOUNT = f"{PREFIX}workload-account"
"""The Kubernetes service account in its certificate: krun's WORKLOAD_SERVICE_ACCOUNT."""

EGRESS = f"{PREFIX}egress"
"""What the workload's Envoy knows of the mesh: hosts of a Sidecar's egress, with commas; NO_SIDECAR: no
Sidecar is made."""

AMBIENT_NETWORK = f"{PREFIX}ambient-network"
"""The network that ambient clients reach by an east-west gateway, and with it the workload."""

STATUS = f"{PREFIX}status"
"""What hgate has made of the object, in a line that it writes itself."""

REFUSED = "refused: "
"""How a status begins that says why nothing leads anywhere."""

SERVICE = f"{PREFIX}service"
"""Label of all that is made for a Service: its name."""

ENDPOINT_OF = f"{PREFIX}endpoint-of"
"""Label by which a Service's ServiceEntry selects hgate as its endpoint: the Service's name."""

AMBIENT_SERVICE = f"{PREFIX}ambient-service"
"""Label by which a Service selects its workload of another network: its own name."""

MANAGED_BY = "app.kubernetes.io/managed-by"
HGATE = "hgate"
"""The value of MANAGED_BY on what is made for a Service, and the field manager that makes it."""

REGISTER = "hbone-register"
"""The field manager of `hbone register`."""

NO_SIDECAR = "none"
METHODS = ("POST", "CONNECT")
MAX_VALUE_CHARS = 300
"""Of an annotation: a URL's host has 253 at most."""

_URL = re.compile(r"https://([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?/?")
_TARGET = re.compile(r"[A-Za-z0-9_-]{1,63}")
_EMAIL = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# NAMESPACE/HOST of a Sidecar's egress: ~ no namespace, . its own, * all.
_EGRESS_HOST = re.compile(r"(?:[~.*]|[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/(?:\*|(?:\*\.)?[a-z0-9.-]{1,253})")

_FORMS: Mapping[str, tuple[re.Pattern[str], str]] = {
    ACCOUNT: (_EMAIL, "a service account's e-mail address"),
    TARGET_PORT: (_TARGET, "a port, or the name of a target"),
    METHOD: (re.compile("|".join(METHODS)), " or ".join(METHODS)),
    AUDIENCE: (re.compile(r"[!-z|~]+"), f"a URL or a name, of {MAX_VALUE_CHARS} characters at most"),
    WORKLOAD: (_LABEL_VALUE, "a label's value: letters, digits and inner - _ ."),
    AMBIENT_NETWORK: (_LABEL_VALUE, "a network's name: letters, digits and inner - _ ."),
    WORKLOAD_ACCOUNT: (
        re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"),
        "the name of a Kubernetes service account",
    ),
    EGRESS: (
        re.compile(rf"{NO_SIDECAR}|{_EGRESS_HOST.pattern}(?:,{_EGRESS_HOST.pattern})*"),
        f"hosts of a Sidecar's egress, NAMESPACE/HOST with commas, or {NO_SIDECAR}",
    ),
}


def check_value(key: str, value: str) -> str:
    """The value of an annotation. Raises ValueError, which says what it has to be, if it cannot be one."""
    if key == URL:
        return f"https://{origin_of(value)}"
    form, meaning = _FORMS[key]
    if len(value) > MAX_VALUE_CHARS or not form.fullmatch(value):
        raise ValueError(f"has to be {meaning}")
    return value


@dataclass(frozen=True, slots=True)
class CloudOrigin:
    """Where an object leads, by https."""

    host: str
    """In lower case."""

    port: int = HTTPS

    def __str__(self) -> str:
        return self.host if self.port == HTTPS else f"{self.host}:{self.port}"


def origin_of(url: str) -> CloudOrigin:
    """What URL's value leads to. Raises ValueError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError("has to be https://HOST, with a port or without, and no path")
    check_host_name(found[1])
    port = int(found[2] or HTTPS)
    if not 1 <= port <= MAX_PORT:
        raise ValueError(f"has a port that is not in 1..{MAX_PORT}")
    return CloudOrigin(found[1].lower(), port)


def inner_tunnel_of(told: Mapping[str, str]) -> str:
    """The URL of tunnels with the HBONE of ambient clients inside, of annotations that are right."""
    return f"https://{origin_of(told[URL])}/_hbone/{HBONE}"


def tunnel_of(told: Mapping[str, str]) -> str:
    """The URL of tunnels, as a route has it, of annotations that are right."""
    target = "" if told.get(METHOD) == "CONNECT" else f"/_hbone/{told.get(TARGET_PORT, INBOUND_MTLS)}"
    return f"https://{origin_of(told[URL])}{target}"
