"""What the log says at the start of what runs."""

from __future__ import annotations

import logging

from shared import version

log = logging.getLogger("hbone.gateway")


def log_versions() -> None:
    """The versions of hgate, Python and OpenSSL, and what an old OpenSSL costs on this CPU."""
    log.info("%s", version.describe("hgate"))
    if slow := version.slow_openssl():
        log.warning("%s", slow)
