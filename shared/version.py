"""What a command says of its version: the distribution's, whether it is compiled, Python's and OpenSSL's.

Imported only where that is asked for: the distribution's metadata takes 20 ms to find.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import ssl
from pathlib import Path

DISTRIBUTION = "hbone"


def installed() -> str | None:
    """The distribution's version; None for a checkout that is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_compiled() -> bool:
    """Whether the modules that tunnels run are compiled (setup.py): what is true of one is true of all."""
    spec = importlib.util.find_spec("shared.http2.session")
    return spec is not None and not (spec.origin or ".py").endswith(".py")


def describe(command: str) -> str:
    """One line about `command`, for people and for reports of faults."""
    version = installed() or "of a checkout that is not installed"
    kind = "compiled" if is_compiled() else "not compiled"
    return f"{command} {version} ({kind}, Python {platform.python_version()}, {ssl.OPENSSL_VERSION})"


def facts(command: str) -> dict[str, str | bool | None]:
    """The same for programs; no version is None."""
    return {
        "command": command,
        "version": installed(),
        "compiled": is_compiled(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "system": platform.system(),
        "machine": platform.machine(),
    }


CPUINFO = Path("/proc/cpuinfo")

FAST_OPENSSL = (3, 2)
"""From this version on OpenSSL encrypts AES-GCM with VAES."""


def slow_openssl(version: tuple[int, ...] = ssl.OPENSSL_VERSION_INFO, cpuinfo: Path = CPUINFO) -> str:
    """What an OpenSSL costs that leaves the VAES of this CPU unused; empty if it uses it or there is none."""
    if version[:2] >= FAST_OPENSSL:
        return ""
    try:
        has_vaes = re.search(r"^flags\s*:.* vaes\b", cpuinfo.read_text(), re.MULTILINE) is not None
    except OSError:
        return ""  # not Linux
    if not has_vaes:
        return ""
    used, wanted = ".".join(map(str, version[:2])), ".".join(map(str, FAST_OPENSSL))
    return (
        f"OpenSSL {used} does not use this CPU's VAES: bulk costs 1.4 to 1.9 times the CPU time of OpenSSL "
        f"{wanted} and newer; see docs/operate.md, OpenSSL"
    )
