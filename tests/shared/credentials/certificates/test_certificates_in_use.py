"""The certificates that hgate has in use, on its admin port and in its metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from cryptography import x509

from shared.credentials.certificates import certificates_in_use
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_files import CertificateFiles, in_use
from shared.net.tls.certificate_folder import NAMES
from shared.net.tls.mesh_tls import client_context
from shared.ops.families import CERTIFICATE_EXPIRY, CERTIFICATE_START
from shared.trust.spiffe import SpiffeId
from tests.support import hbone_port
from tests.support.hbone_port import CALLER, GATEWAY, Mesh
from tests.support.running_gateway import running


def end_of(folder: Path) -> float:
    return end_of_pem(certificate_folder.find(folder).certificates.read_bytes())


def end_of_pem(pem: bytes) -> float:
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


async def test_what_hgate_shows_and_its_metric(tmp_path: Path) -> None:
    async with hbone_port.serving(tmp_path / "port") as port, running(tmp_path / "hgate.yaml", []) as gateway:
        own = port.mesh.folder_of(GATEWAY)
        (row,) = [row for row in await gateway.dump("/certs") if row["path"] == f"{own}/certificates.pem"]
        assert (row["certificate"], row["ca_path"]) == ("hbone", f"{own}/ca_certificates.pem")
        assert row["cert_chain"][0]["identity"] == str(GATEWAY)
        assert row["ca_cert"][0]["trust_domain"] == GATEWAY.trust_domain
        # A port of an earlier test may not be forgotten yet.
        ends = [end_of_pem(files.chain_pem) for files in in_use() if files.purpose == "hbone"]
        assert end_of(own) in ends
        assert await gateway.metric(CERTIFICATE_EXPIRY.name, certificate="hbone") == min(ends)
        begun = await gateway.metric(CERTIFICATE_START.name, certificate="hbone")
        assert 0 < time.time() - begun < min(ends) - begun
        assert "PRIVATE" not in (await gateway.get("admin", "/certs")).body.decode()


async def test_a_text_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "certificates.pem"
    file.write_bytes(b"OpenSSL may take it")
    files = CertificateFiles((file,), lambda: None, log=logging.getLogger("hbone.test"), purpose="odd")
    files.read()
    (row,) = [row for row in certificates_in_use.rows() if row["certificate"] == "odd"]
    assert (row["cert_chain"], row["ca_cert"]) == ([], [])
    for family in certificates_in_use.families():
        assert "odd" not in [sample.labels["certificate"] for sample in family.samples]


def test_a_client_s_certificate_is_in_use_once_it_was_read(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    identity = mesh.client(SpiffeId.of_workload("demo.local", "demo", "shown"))
    purpose = f"identity {identity.folder}"
    assert purpose not in [files.purpose for files in in_use()]
    client_context(identity, 0.0)
    (row,) = [row for row in certificates_in_use.rows() if row["certificate"] == purpose]
    assert row["cert_chain"][0]["identity"].endswith("/sa/shown")
    family, _ = certificates_in_use.families()
    ends = {sample.labels["certificate"]: sample.value for sample in family.samples}
    assert ends[purpose] == end_of(identity.folder)


@pytest.mark.parametrize("names", NAMES)
async def test_the_hbone_port_takes_any_names(tmp_path: Path, names: tuple[str, str, str]) -> None:
    mesh = Mesh(tmp_path / "mesh")
    folder = tmp_path / "own"
    folder.mkdir()
    for source, name in zip(certificate_folder.find(mesh.member(GATEWAY)).all, names, strict=True):
        (folder / name).write_bytes(source.read_bytes())
    async with hbone_port.serving(tmp_path / "port", certificates=folder) as port:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port.port, ssl=mesh.tls(mesh.member(CALLER)), server_hostname=""
        )
        writer.close()
