"""What a command says of its version: the distribution's, Python's and OpenSSL's.

Imported only where that is asked for: the distribution's metadata takes 20 ms to find.
"""

from __future__ import annotations

import importlib.metadata
import platform
import ssl

DISTRIBUTION = "hbone"


def describe(command: str) -> str:
    """One line about `command`, for people and for reports of faults."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = "of a checkout that is not installed"
    return f"{command} {version} (Python {platform.python_version()}, {ssl.OPENSSL_VERSION})"
