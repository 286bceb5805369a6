"""The name of a Cloud Run service in the host of its URL."""

from __future__ import annotations

import re

# SERVICE-HASH-REGION and SERVICE-PROJECTNUMBER (Cloud Run, "URLs"), behind TAG--- if there is a tag.
_SERVICE = re.compile(r"(?:.*---)?([a-z](?:[a-z0-9-]*[a-z0-9])?)-(?:[a-z0-9]{10}-[a-z]{1,2}|[0-9]+)")


def name_in(host: str) -> str:
    """`hello` of hello-123456789012.us-central1.run.app; of any other host its first label."""
    first = host.partition(".")[0]
    found = _SERVICE.fullmatch(first)
    return found[1] if found else first
