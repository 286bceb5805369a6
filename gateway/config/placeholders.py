"""Placeholders of examples that are still in hgate's file.

They are the words of the examples in docs and deploy/k8s. `{service}` and the like are no placeholders in
this sense.
"""

from __future__ import annotations

import re

from gateway.config.yaml_nodes import Value

_WORDS = (
    "PROJECT",
    "PROJECT_ID",
    "PROJECT_NUMBER",
    "NUMBER",
    "REGION",
    "CLUSTER",
    "SERVICE",
    "NAMESPACE",
    "POOL",
    "PROVIDER",
    "HOST",
    "PORT",
)

_PLACEHOLDER = re.compile(
    rf"(?<![A-Za-z0-9_])(?:{'|'.join(_WORDS)})(?![A-Za-z0-9_])"
    r"|(?<![A-Za-z0-9])123456789(?![A-Za-z0-9])"
    r"|(?<![A-Za-z0-9-])example\.(?:com|net|org)(?![A-Za-z0-9.-])"
)


def note(document: Value) -> None:
    """Warns of each value in which a placeholder is left."""
    for value in document.scalars():
        if found := _PLACEHOLDER.search(str(value.node.value)):
            value.warn(f"has {found[0]}, a placeholder of an example: put in your own")
