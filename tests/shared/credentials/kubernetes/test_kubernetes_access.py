"""Which API server there is, and with what we come to it."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from shared.credentials.certificates.authority import Authority
from shared.credentials.kubernetes.kubernetes_access import Access, Pem
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.credentials.kubernetes.kubernetes_discovery import find_access, in_cluster
from shared.credentials.kubernetes.kubernetes_tokens import KubernetesTokens
from shared.credentials.tokens.tokens import NoToken
from shared.errors import TokenError, UnavailableError
from shared.net.http1 import Target
from shared.net.tls.contexts import server_context
from tests.support import odd_chains
from tests.support.api_server import NAMESPACE, SERVICE_ACCOUNT, LocalApiServer, kubeconfig
from tests.support.tls_verdicts import handshake


def pod_folder(folder: Path, server: LocalApiServer) -> Path:
    """What the kubelet mounts."""
    (folder / "token").write_text(server.allowed)
    (folder / "ca.crt").write_bytes(server.ca_pem)
    (folder / "namespace").write_text(NAMESPACE)
    return folder


async def minted(access: Access) -> str:
    minter = KubernetesTokens(KubernetesApi(access), access.namespace, SERVICE_ACCOUNT)
    return (await minter.mint("istio-ca")).token


async def test_a_pod_uses_its_service_account(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        folder = pod_folder(tmp_path, server)
        place = Target.parse(server.url)
        environ = {"KUBERNETES_SERVICE_HOST": place.host, "KUBERNETES_SERVICE_PORT": str(place.port)}
        found = find_access(environ, folder)
        assert (found.server, found.namespace) == (server.url, NAMESPACE)
        assert found.authority_pem() == server.ca_pem
        await server.verify(await minted(found), "istio-ca")


async def test_the_token_of_a_pod_is_read_again_when_the_kubelet_has_renewed_it(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        folder = pod_folder(tmp_path, server)
        found = in_cluster("127.0.0.1", str(Target.parse(server.url).port), folder)
        await minted(found)
        server.users = {"N3xt-token": "krun"}
        (folder / "new").write_text("N3xt-token")
        os.replace(folder / "new", folder / "token")
        await minted(found)
    assert server.asked[-1].headers["authorization"] == "Bearer N3xt-token"


async def test_so_is_the_authority(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        folder = pod_folder(tmp_path, server)
        (folder / "ca.crt").write_bytes(Authority.create("cluster.local").root_pem)
        found = in_cluster("127.0.0.1", str(Target.parse(server.url).port), folder)
        with pytest.raises(TokenError, match="certificate refused: "):
            await minted(found)
        assert not server.asked, "nothing was sent to a server that could not prove itself"
        (folder / "ca.crt").write_bytes(server.ca_pem)
        await minted(found)


async def test_a_client_certificate_that_is_given() -> None:
    async with LocalApiServer() as server:
        own = server.authority.issue(dns_names=["krun.example"])
        pair = (Pem("chain", given=own.certificate_pem), Pem("key", given=own.key_pem))
        await minted(Access(server.url, NoToken(), NAMESPACE, Pem("ca", given=server.ca_pem), pair))
        assert "authorization" not in server.asked[0].headers


async def test_a_client_certificate_in_files(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        own = server.authority.issue(dns_names=["krun.example"])
        (tmp_path / "crt").write_bytes(own.certificate_pem)
        (tmp_path / "key").write_bytes(own.key_pem)
        pair = (Pem("crt", tmp_path / "crt"), Pem("key", tmp_path / "key"))
        await minted(Access(server.url, NoToken(), NAMESPACE, Pem("ca", given=server.ca_pem), pair))


def broken(**changes: object) -> Access:
    known = {"server": "https://127.0.0.1:1", "bearer": GivenToken("T0ken")}
    return Access(**{**known, **changes})  # type: ignore[arg-type]  # the test's own words


def test_certificates_that_are_no_good() -> None:
    authority, other = Authority.create("a.example"), Authority.create("b.example")
    one, two = authority.issue(dns_names=["a"]), other.issue(dns_names=["b"])
    crossed = (Pem("the chain", given=one.certificate_pem), Pem("the key", given=two.key_pem))
    with pytest.raises(
        UnavailableError, match=r"client certificate the chain, key the key: .*belong together"
    ):
        broken(certificate=crossed).tls()
    with pytest.raises(UnavailableError, match="client certificate the chain"):
        broken(certificate=(Pem("the chain", given=b"garbage"), Pem("the key", given=b"garbage"))).tls()
    for pem, reason in ((b"garbage", "no certificate in PEM"), (b"", "empty"), (b" \n", "empty")):
        # An empty ca.crt is not the system's certificates.
        with pytest.raises(UnavailableError, match=f"trusted certificates of .*: the authority: {reason}"):
            broken(authority=Pem("the authority", given=pem)).tls()
    with pytest.raises(UnavailableError, match=r"cannot read /no/such/ca: No such file"):
        broken(authority=Pem("/no/such/ca", Path("/no/such/ca"))).tls()
    with pytest.raises(UnavailableError, match=r"no ca\.crt for https"):
        broken().authority_pem()


@pytest.mark.parametrize("name", ["no key identifiers", "no key identifiers, three", "issuing authority"])
def test_a_server_whose_authority_has_no_key_identifiers(tmp_path: Path, name: str) -> None:
    """As EKS has them; and one whose kubeconfig has the issuing authority without its root."""
    chain = odd_chains.all_chains()[name]
    chain.write(tmp_path / "chain")
    server = server_context(tmp_path / "chain" / "shown.pem", tmp_path / "chain" / "key.pem")
    client = broken(authority=Pem("certificate-authority-data", given=chain.trusted)).tls()
    handshake(client, server, odd_chains.NAME)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client, server, "other.example.test")


def test_a_key_with_a_password_is_refused_without_asking_anybody_for_it() -> None:
    from cryptography.hazmat.primitives import serialization

    own = Authority.create("a.example").issue(dns_names=["a"])
    key = serialization.load_pem_private_key(own.key_pem, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    with pytest.raises(UnavailableError, match="the key is encrypted"):
        broken(certificate=(Pem("c", given=own.certificate_pem), Pem("k", given=key))).tls()


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "ca").write_bytes(b"x" * (1024 * 1024 + 1))
    with pytest.raises(UnavailableError, match="longer than 1048576 bytes"):
        Pem("the file", tmp_path / "ca").read()


def test_secrets_are_not_shown() -> None:
    shown = repr(broken(certificate=(Pem("c", given=b"CERT"), Pem("k", given=b"S3cret"))))
    assert "S3cret" not in shown and "T0ken" not in shown


# The choice.


async def test_kubeconfig_comes_first(tmp_path: Path) -> None:
    async with LocalApiServer() as server:
        file = tmp_path / "config"
        file.write_text(kubeconfig(server, namespace="from-the-file"))
        found = find_access({"KUBECONFIG": f"/no/such/file:{file}", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (found.server, found.namespace) == (server.url, "from-the-file")


async def test_the_home_folder_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"no Kubernetes API server: set KUBECONFIG"):
        find_access({"KUBECONFIG": " ", "KUBERNETES_SERVICE_HOST": ""})
    (tmp_path / ".kube").mkdir()
    async with LocalApiServer() as server:
        (tmp_path / ".kube" / "config").write_text(kubeconfig(server))
        assert find_access({}).server == server.url


def test_a_pod_without_a_mounted_token(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="automountServiceAccountToken"):
        find_access({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


def test_addresses_of_a_pod(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("T0ken")
    assert in_cluster("10.0.0.1", "", tmp_path).server == "https://10.0.0.1:443"
    assert in_cluster("fd00::1", "6443", tmp_path).server == "https://[fd00::1]:6443"
    assert in_cluster("10.0.0.1", "", tmp_path).namespace == "default"
    with pytest.raises(UnavailableError, match="KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT: "):
        in_cluster("10.0.0.1", "https", tmp_path)
