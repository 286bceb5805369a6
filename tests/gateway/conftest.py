"""What the gateway's tests share."""

from __future__ import annotations

import datetime
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support import gateway_world
from tests.support.gateway_world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world.world(tmp_path) as world:
        yield world


@pytest.fixture(scope="session")
def ca_pem() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")])
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365))
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def folder(tmp_path: Path, ca_pem: bytes) -> Path:
    """A folder with files that settings may name."""
    (tmp_path / "ca.pem").write_bytes(ca_pem)
    (tmp_path / "two.pem").write_bytes("# Zürich\n".encode() + ca_pem + b"\n" + ca_pem)
    (tmp_path / "empty.pem").write_bytes(b"")
    (tmp_path / "text.pem").write_bytes(b"no certificate here\n")
    (tmp_path / "cut.pem").write_bytes(ca_pem[: len(ca_pem) // 2])
    (tmp_path / "folder.pem").mkdir()
    os.mkfifo(tmp_path / "pipe.pem")
    return tmp_path
