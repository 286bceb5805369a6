"""Patterns of names that match fewer names than their author may think.

A `*` is one label, and was any number of them once. So a pattern that matches no Service of Kubernetes, or
that denies a name and none below it, may be meant to have `**`.
"""

from __future__ import annotations

import re

from gateway.config.yaml_nodes import Value
from gateway.rules.host_globs import can_be_service, wider
from gateway.rules.templates import SERVICE_FORM
from shared.name_globs import ANY_LABEL

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def hint(glob: str) -> str:
    """`: did you mean GLOB?` where `glob` would match Services with a `**`, else empty."""
    meant = wider(glob)
    return f": did you mean {meant}?" if meant != glob and can_be_service(meant) else ""


def note_narrow(value: Value, glob: str) -> None:
    """Warns if `glob`, which `value` has, seems to be about Services and matches none."""
    labels = glob.lower().split(".")
    is_of_cluster = "svc" in labels or labels[-1] == ANY_LABEL or labels[-2:] == ["cluster", "local"]
    if is_of_cluster and not can_be_service(glob) and (meant := hint(glob)):
        value.warn(f"matches no name of the form {SERVICE_FORM}, for * is one label{meant}")


def note_name(value: Value, pattern: str, denies: bool) -> None:
    """Warns of a pattern for names that workloads register."""
    _note(value, _PLACEHOLDER.sub("x", pattern), pattern, denies)


def note_target(value: Value, pattern: str, denies: bool) -> None:
    """Warns of a HOST:PORT whose HOST is a glob."""
    host = pattern.rpartition(":")[0]
    if host != ANY_LABEL and "/" not in host and ":" not in host:
        _note(value, host, host, denies)


def _note(value: Value, glob: str, written: str, denies: bool) -> None:
    if not denies:
        note_narrow(value, glob)
    elif ANY_LABEL in written.split("."):
        meant = wider(written)
        value.warn(f"* is one label, so longer names are not denied: did you mean {meant}?")
