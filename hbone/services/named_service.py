"""Names of services, as people write them in place of a URL: SERVICE[.NAMESPACE][:PORT].

The rule that tells a service from a host:

1. What has a scheme or a path is a URL, and its host a host.
2. A name of one label or two is a service: SERVICE, or SERVICE.NAMESPACE. So are SERVICE.NAMESPACE.svc and
   SERVICE.NAMESPACE.svc.cluster.local.
3. Any other name is a host: one with more labels, `localhost`, an IP address, one that ends with a dot, one
   that is no name of a Service (RFC 1123 labels).

Nothing is tried as the other when it is not found: what a name means does not depend on what is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(
    rf"(?P<name>{_LABEL})(?:\.(?P<namespace>{_LABEL})(?:\.svc(?:\.cluster\.local)?)?)?"
    r"(?::(?P<port>[A-Za-z0-9_-]{1,63}))?",
)
# What else a name without dots may be: an IPv4 address in one of its short forms (inet_aton(3)).
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class ServiceName:
    """What somebody calls a service."""

    name: str
    namespace: str = ""
    """Empty: that of the kubeconfig's context, or any of the Google project."""

    port: str = ""
    """A port of the container or the name of a target; empty if none is named."""

    def __str__(self) -> str:
        return f"{self.name}.{self.namespace}" if self.namespace else self.name


def read(text: str) -> ServiceName | None:
    """The service that `text` names; None if it is a host or a URL, or nothing at all."""
    # Letters beyond ASCII may become others in lower case: the Kelvin sign a k.
    found = _NAME.fullmatch(text.lower()) if text.isascii() else None
    if found is None or found["name"] == "localhost":
        return None
    if _NUMBER.fullmatch(found["namespace"] or found["name"]):
        return None
    # Names of targets are variables of krun's, which differ by case.
    port = text[found.start("port") :] if found["port"] else ""
    return ServiceName(found["name"], found["namespace"] or "", port)
