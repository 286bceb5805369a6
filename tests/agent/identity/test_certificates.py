"""krun's keeper with each authority, real ones on loopback."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from agent.config.certificate_settings import CertificateSettings
from agent.config.settings import Settings, from_env
from agent.identity.certificates import make_keeper
from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.certificate_keeper import CertificateKeeper
from shared.errors import SigningError
from shared.net.tls import certificate_check, certificate_folder
from shared.net.tls.certificate_check import Findings
from shared.trust.spiffe import SpiffeId
from tests.support.cas_server import POOL, CasServer
from tests.support.google import Google
from tests.support.google_services import MACHINE
from tests.support.istiod import Istiod
from tests.support.system_trust import system_trusts

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJpc3Rpby1jYSJ9.c2lnbmF0dXJl"
NOWHERE = "127.0.0.1:9"


def found(folder: Path) -> Findings:
    return certificate_check.read(certificate_folder.find(folder), datetime.now(UTC))


async def test_the_development_ca(tmp_path: Path) -> None:
    settings = CertificateSettings("dev", HELLO, folder=tmp_path / "ca", key_kind="rsa", lifetime_s=3600)
    keeper = make_keeper(settings, tmp_path / "certs")
    await keeper.start()
    await keeper.close()
    read = found(tmp_path / "certs")
    assert (read.faults, read.chain_fault, read.identity) == ((), "", HELLO)
    assert read.key_kind == "RSA 2048"
    left_s = read.chain[0].not_valid_after_utc.timestamp() - datetime.now(UTC).timestamp()
    assert 3500 < left_s <= 3600


async def test_istiod_with_a_token(tmp_path: Path) -> None:
    mesh = Authority.create("demo.local")
    (tmp_path / "token").write_text(TOKEN)
    with Istiod(mesh, HELLO, token=TOKEN).serving() as istiod:
        settings = CertificateSettings(
            "istio",
            HELLO,
            address=istiod.address,
            token_file=tmp_path / "token",
            cluster_id="cn-demo",
            roots={"CAROOT_ISTIOD": mesh.root_pem.decode()},
        )
        keeper = make_keeper(settings, tmp_path / "certs")
        await keeper.start()
        assert istiod.calls[0].metadata["clusterid"] == "cn-demo"
        before = found(tmp_path / "certs").chain[0]

        # From then on the certificate can speak for us, too, but the token is what is asked for.
        istiod.token = "another"
        with pytest.raises(SigningError, match="UNAUTHENTICATED") as refused:
            await keeper.renew()
        assert TOKEN not in str(refused.value)
        assert found(tmp_path / "certs").chain[0] == before
        (tmp_path / "token").write_text("another")
        await keeper.renew()
        assert found(tmp_path / "certs").chain[0] != before
        await keeper.close()
    assert found(tmp_path / "certs").faults == ()


async def test_istiod_with_the_certificate_that_is_renewed(tmp_path: Path) -> None:
    mesh = Authority.create("demo.local")
    mesh.write(tmp_path / "certs", mesh.issue(HELLO))
    with Istiod(mesh, HELLO).serving(wants_certificate=True) as istiod:
        settings = CertificateSettings(
            "istio", HELLO, address=istiod.address, roots={"CAROOT_ISTIOD": mesh.root_pem.decode()}
        )
        keeper = make_keeper(settings, tmp_path / "certs")
        await keeper.start()
        assert keeper.renewals == 0, "there is a good one"
        for _ in range(2):
            await keeper.renew()
        await keeper.close()
        assert [call.identity for call in istiod.calls] == [str(HELLO)] * 2
    assert found(tmp_path / "certs").faults == ()


def cas(server: CasServer, folder: Path, **more: str) -> Settings:
    """krun's settings with Google's CA Service."""
    told = {
        "HBONE_CA": "cas",
        "CA_POOL": POOL,
        "HBONE_CAS_URL": server.endpoint,
        "HBONE_CERTS": str(folder / "certs"),
        "TRUST_DOMAIN": "demo.local",
        "WORKLOAD_NAMESPACE": "demo",
        "WORKLOAD_SERVICE_ACCOUNT": "hello",
    }
    return from_env({**told, **more})


def keeper_of(settings: Settings) -> CertificateKeeper:
    assert settings.authority is not None
    return make_keeper(settings.authority, settings.certificates)


async def test_google_cas_as_the_account_that_the_machine_runs_as(tmp_path: Path) -> None:
    mesh = Authority.create("demo.local")
    (tmp_path / "ca.pem").write_bytes(mesh.root_pem)
    with system_trusts(tmp_path / "ca.pem"):
        await renewed_by_the_machine_s_account(mesh, tmp_path)


async def renewed_by_the_machine_s_account(mesh: Authority, tmp_path: Path) -> None:
    async with (
        Google() as google,
        CasServer(mesh, HELLO, accepts=lambda token: google.owner(token) == MACHINE) as server,
    ):
        told = {"GCE_METADATA_HOST": google.metadata_host, "HBONE_CAS_NAMES": "request"}
        keeper = keeper_of(cas(server, tmp_path, **told))
        await keeper.start()
        serials = [found(tmp_path / "certs").chain[0].serial_number]
        for _ in range(3):
            await keeper.renew()
            serials.append(found(tmp_path / "certs").chain[0].serial_number)
        google.revoke_all()
        with pytest.raises(SigningError, match=r"401: UNAUTHENTICATED: .*; is the access token for"):
            await keeper.renew()
        assert len(google.requests) == 1, "one token is good for an hour"
        assert found(tmp_path / "certs").chain[0].serial_number == serials[-1], "the old one stays"
        await keeper.renew()
        serials.append(found(tmp_path / "certs").chain[0].serial_number)
        assert len(google.requests) == 2, "one that is not taken is not shown again"
        await keeper.close()
        assert {asked.content["subjectMode"] for asked in server.asked if asked.content} == {"DEFAULT"}
    assert len(set(serials)) == 5
    read = found(tmp_path / "certs")
    assert (read.faults, read.chain_fault, read.identity) == ((), "", HELLO)
    assert read.chain[0].serial_number == serials[-1]


async def test_google_cas_with_a_token_in_a_file(tmp_path: Path) -> None:
    mesh = Authority.create("demo.local")
    (tmp_path / "ca.pem").write_bytes(mesh.root_pem)
    (tmp_path / "token").write_text("one-token")
    with system_trusts(tmp_path / "ca.pem"):
        async with CasServer(mesh, HELLO, token="one-token") as server:
            keeper = keeper_of(cas(server, tmp_path, HBONE_CA_TOKEN_FILE=str(tmp_path / "token")))
            await keeper.start()
            server.token = "another-token"
            (tmp_path / "token").write_text("another-token")
            await keeper.renew()
            await keeper.close()
    assert found(tmp_path / "certs").identity == HELLO


async def test_google_cas_without_a_metadata_server(tmp_path: Path) -> None:
    async with CasServer(Authority.create("demo.local"), HELLO) as server:
        keeper = keeper_of(cas(server, tmp_path, GCE_METADATA_HOST=NOWHERE))
        with pytest.raises(SigningError, match=f"no token for it: no metadata server: .* {NOWHERE}"):
            await keeper.renew()
        assert server.asked == []
