"""What a command says of its version: the distribution's, Python's and OpenSSL's.

Imported only where that is asked for: the distribution's metadata takes 20 ms to find.
"""

from __future__ import annotations

import importlib.metadata
import platform
import ssl

DISTRIBUTION = "hbone"


def installed() -> str | None:
    """The distribution's version; None for a checkout that is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(command: str) -> str:
    """One line about `command`, for people and for reports of faults."""
    version = installed() or "of a checkout that is not installed"
    return f"{command} {version} (Python {platform.python_version()}, {ssl.OPENSSL_VERSION})"
