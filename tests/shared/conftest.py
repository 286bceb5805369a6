"""What tests of shared/ have in common: a loop that skips the waiting, for deadlines, and a certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.credentials.certificates.authority import Authority
from tests.shared.net.hasty_loop import HastyLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    marker = item.get_closest_marker("asyncio")
    if marker is not None and "loop_factories" in marker.kwargs:
        return {"hasty": HastyLoop}
    return None  # as for all tests


@dataclass(frozen=True, slots=True)
class Credentials:
    """A server's certificate for `localhost` and 127.0.0.1, in files, and the CA to trust."""

    ca: Path
    certificate: Path
    key: Path
    other_ca: Path
    """Of somebody else."""


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("credentials")
    authority, other = Authority.create("test.local"), Authority.create("other.local")
    pair = authority.issue(dns_names=["localhost"], ip_addresses=["127.0.0.1"])
    files = Credentials(*(folder / name for name in ("ca.pem", "cert.pem", "key.pem", "other_ca.pem")))
    files.ca.write_bytes(authority.root_pem)
    files.certificate.write_bytes(pair.certificate_pem)
    files.key.write_bytes(pair.key_pem)
    files.other_ca.write_bytes(other.root_pem)
    return files
