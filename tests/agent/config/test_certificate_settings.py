"""The variables about the authority that signs krun's certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.certificate_settings import CertificateSettings
from agent.config.kubernetes_settings import ISTIO_FILE
from agent.config.settings import DEFAULT_CERTIFICATES, from_env
from shared.address import Address
from shared.errors import UsageError
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_folder import NAMES
from shared.private_folder import runtime_folder
from shared.trust.spiffe import SpiffeId

LEAST = {"HBONE_CA": "istio", "TRUST_DOMAIN": "cluster.local", "CA_ADDR": "istiod.example:15012"}
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJpc3Rpby1jYSJ9.c2lnbmF0dXJl"
POOL = "projects/p/locations/europe-west1/caPools/mesh"


def read(**environ: str) -> CertificateSettings:
    found = from_env(LEAST | environ).authority
    assert found is not None
    return found


def test_the_development_ca_is_the_user_s_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert read(HBONE_CA="dev", XDG_RUNTIME_DIR=str(tmp_path)).folder == tmp_path / "hbone" / "dev-ca"
    elsewhere = read(HBONE_CA="dev", XDG_RUNTIME_DIR="/nonexistent").folder
    assert elsewhere == runtime_folder(None) / "dev-ca"
    assert read(HBONE_CA="dev", HBONE_CA_FOLDER="/ca").folder == Path("/ca")


def test_the_least() -> None:
    assert read() == CertificateSettings(
        "istio",
        SpiffeId.of_workload("cluster.local", "default", "default"),
        address=Address("istiod.example", 15012),
        token_file=ISTIO_FILE,
    )


def test_everything() -> None:
    assert read(
        HBONE_CA="CAS",
        HBONE_CA_NAME="istiod.other.svc",
        CLUSTER_ID="cn-p-l-c",
        CA_POOL=POOL,
        HBONE_CAS_URL="http://127.0.0.1:1",
        HBONE_CAS_NAMES="request",
        HBONE_CA_TOKEN_FILE="/token",
        GCE_METADATA_HOST="127.0.0.1:2",
        HBONE_CA_FOLDER="/ca",
        HBONE_CA_TIMEOUT="5",
        HBONE_CERT_LIFETIME="3600",
        HBONE_CERT_RENEW_AT="0.7",
        HBONE_CERT_KEY="rsa",
        HBONE_CERT_OWNER="1337:1338",
        CAROOT_ISTIOD="PEM 1",
        CAROOT_CAS="PEM 2",
        HBONE_ROOTS="/a, /b",
        WORKLOAD_NAMESPACE="demo",
        WORKLOAD_SERVICE_ACCOUNT="hello",
    ) == CertificateSettings(
        "cas",
        SpiffeId.of_workload("cluster.local", "demo", "hello"),
        address=Address("istiod.example", 15012),
        server_name="istiod.other.svc",
        cluster_id="cn-p-l-c",
        pool=POOL,
        cas_url="http://127.0.0.1:1",
        cas_names="request",
        token_file=Path("/token"),
        metadata_host="127.0.0.1:2",
        folder=Path("/ca"),
        start_timeout_s=5,
        lifetime_s=3600,
        renew_at=0.7,
        key_kind="rsa",
        owner=(1337, 1338),
        roots={"CAROOT_ISTIOD": "PEM 1", "CAROOT_CAS": "PEM 2"},
        root_files=(Path("/a"), Path("/b")),
    )


def test_by_default_nobody_is_asked() -> None:
    assert from_env({}).authority is None
    assert from_env({"HBONE_CA": "none", "WORKLOAD_NAMESPACE": "demo"}).authority is None


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"CA_ADDR": "a:1", "XDS_ADDR": "b:2", "MCON_ADDR": "c"}, Address("a", 1)),
        ({"XDS_ADDR": "b:2", "MCON_ADDR": "c"}, Address("b", 2)),
        ({"XDS_ADDR": "-", "MCON_ADDR": "10.0.0.1"}, Address("10.0.0.1", 15012)),
        ({"MCON_ADDR": "[2001:db8::1]"}, Address("2001:db8::1", 15012)),
        ({"MCON_ADDR": "c:3"}, Address("c", 3)),
    ],
)
def test_where_istios_ca_is(environ: dict[str, str], address: Address) -> None:
    found = from_env({"HBONE_CA": "istio", "TRUST_DOMAIN": "x", **environ}).authority
    assert found is not None
    assert found.address == address


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"CA_ADDR": ""}, "HBONE_CA=istio, but none of CA_ADDR, XDS_ADDR and MCON_ADDR is set"),
        ({"TRUST_DOMAIN": ""}, "HBONE_CA=istio, but TRUST_DOMAIN is not set"),
        ({"HBONE_CA": "cas"}, "HBONE_CA=cas, but CA_POOL is no projects/P/locations/L/caPools/POOL"),
        ({"HBONE_CA": "cas", "CA_POOL": "mesh"}, "but CA_POOL is no projects/"),
        ({"HBONE_CA": "vault"}, r"invalid HBONE_CA=vault \(must be none, istio, cas or dev\)"),
        ({"CA_ADDR": "istiod"}, "invalid CA_ADDR=istiod"),
        ({"CA_ADDR": "istiod:0"}, r"invalid CA_ADDR=istiod:0 \(port 0 cannot be dialled\)"),
        ({"WORKLOAD_NAMESPACE": "a/b"}, "invalid WORKLOAD_NAMESPACE=a/b"),
        ({"WORKLOAD_SERVICE_ACCOUNT": ".."}, "invalid WORKLOAD_SERVICE_ACCOUNT=.."),
        ({"HBONE_CERT_LIFETIME": "1"}, "must be between 60s and 7776000s"),
        ({"HBONE_CERT_RENEW_AT": "nan"}, r"must be in 0\.2\.\.0\.9"),
        ({"HBONE_CA_TIMEOUT": "0"}, "invalid HBONE_CA_TIMEOUT=0"),
        ({"HBONE_CERT_KEY": "dsa"}, "must be ec or rsa"),
        ({"HBONE_CERT_OWNER": "nobody-of-that-name"}, "no such user or group"),
        ({"HBONE_ROOTS": ","}, "nothing but commas"),
        ({"HBONE_CAS_NAMES": "me"}, "must be caller or request"),
        ({"HBONE_CAS_URL": "ftp://x"}, r"HBONE_CAS_URL \(URL with scheme 'ftp'"),
        ({"HBONE_CAS_URL": "http://cas.example"}, r"HBONE_CAS_URL \(has to be https: it gets tokens"),
        ({"HBONE_CA_TOKEN_FILE": TOKEN}, r"^invalid HBONE_CA_TOKEN_FILE \(has to be a file's path; .*\)$"),
        ({"GCE_METADATA_HOST": "http://metadata"}, "has to be HOST or HOST:PORT"),
    ],
)
def test_what_is_wrong(environ: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        from_env(LEAST | environ)


def test_no_token() -> None:
    assert read(HBONE_CA_TOKEN_FILE="-").token_file is None
    assert read(HBONE_CA="cas", CA_POOL=POOL).token_file is None


def test_istios_token_is_where_krun_keeps_it_itself() -> None:
    assert read(HBONE_K8S_TOKENS="a=/a,istio-ca=/b").token_file == Path("/b")
    assert read(HBONE_K8S_TOKENS="istio-ca=/folder/").token_file == Path("/folder/token")
    assert read(HBONE_K8S_TOKENS="istio-ca=/b", HBONE_CA_TOKEN_FILE="/c").token_file == Path("/c")
    assert read(HBONE_K8S_TOKENS="a=/a").token_file == ISTIO_FILE


def test_files_of_the_platform_are_looked_for_but_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (DEFAULT_CERTIFICATES, tmp_path)
    monkeypatch.setattr(certificate_folder, "FOLDERS", folders)
    for name in NAMES[1]:
        (tmp_path / name).write_text("")
    assert from_env({}).certificates == tmp_path
    assert from_env({"HBONE_CERTS": "/mine"}).certificates == Path("/mine")
    assert from_env(LEAST).certificates == DEFAULT_CERTIFICATES
