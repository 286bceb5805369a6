"""Policy is not lost in silence: what a start says where a mesh is configured and HBONE_ALLOW is not."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from agent.config.settings import Settings, from_env
from agent.policy.policy_warning import policy_warning
from shared.address import Address
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId
from tests.agent.test_app import krun
from tests.support.hbone_port import Mesh
from tests.support.world import find_envoy

HELLO = SpiffeId("demo.local", "/ns/demo/sa/hello")
MTLS_END = Address("127.0.0.1", 15003)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return Mesh(tmp_path).member(HELLO)


def warning(certificates: Path, **environ: str) -> str | None:
    return policy_warning(from_env({"HBONE_CERTS": str(certificates), **environ}), MTLS_END)


def test_it_says_what_is_open_to_whom_and_how_to_close_it(certificates: Path) -> None:
    assert warning(certificates, XDS_ADDR="istiod:15012") == (
        "HBONE_ALLOW is not set, and krun does not enforce the mesh's AuthorizationPolicy (XDS_ADDR is set): "
        "every workload of trust domain demo.local may reach the app on 127.0.0.1:8080 through the mTLS end "
        "on 127.0.0.1:15003; name those that may, such as HBONE_ALLOW=ns/demo/sa/*"
    )


@pytest.mark.parametrize(
    ("environ", "sign"),
    [
        ({"MESH": "gke://PROJECT"}, "(MESH is set)"),
        ({"HBONE_CA": "istio", "CA_ADDR": "istiod:15012", "TRUST_DOMAIN": "demo.local"}, "(HBONE_CA=istio)"),
        (
            {
                "HBONE_CA": "cas",
                "CA_POOL": "projects/p/locations/l/caPools/c",
                "TRUST_DOMAIN": "demo.local",
                "HBONE_CAS_NAMES": "request",
            },
            "(HBONE_CA=cas)",
        ),
        ({"XDS_ADDR": "istiod:1", "TRUST_DOMAIN_ALIASES": "old.local"}, "domain demo.local, old.local may"),
        ({"XDS_ADDR": "istiod:1", "TRUST_DOMAIN": "other.local"}, "domain other.local may"),
        ({"XDS_ADDR": "a:1", "HBONE_DENY": "ns/x/sa/*"}, "demo.local, but for ns/x/sa/* (HBONE_DENY) may"),
        ({"XDS_ADDR": "istiod:1", "HBONE_APP": "127.0.0.1:9000"}, "may reach the app on 127.0.0.1:9000"),
    ],
)
def test_each_sign_of_a_mesh_and_each_setting_that_counts(
    certificates: Path, environ: dict[str, str], sign: str
) -> None:
    assert sign in (warning(certificates, **environ) or "")


def test_certificates_that_a_mesh_has_mounted_are_a_sign(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_folder, "FOLDERS", (certificates,))
    settings = dataclasses.replace(Settings(), certificates=certificates)
    assert f"(the mesh's certificates are in {certificates})" in (policy_warning(settings, MTLS_END) or "")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"XDS_ADDR": "-"},
        {"XDS_ADDR": "istiod:15012", "HBONE_ALLOW": "ns/demo/sa/*"},
        {"HBONE_CA": "dev", "TRUST_DOMAIN": "demo.local"},
    ],
)
def test_without_a_mesh_or_with_a_list_there_is_nothing_to_say(
    certificates: Path, environ: dict[str, str]
) -> None:
    assert warning(certificates, **environ) is None


def test_a_certificate_that_names_no_workload(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    mesh.authority.write(tmp_path / "own", mesh.authority.issue(dns_names=["hello"]))
    text = warning(tmp_path / "own", XDS_ADDR="istiod:1", TRUST_DOMAIN="demo.local") or ""
    assert "workload of trust domain demo.local may" in text
    assert "HBONE_ALLOW=ns/NAMESPACE/sa/*" in text


@pytest.mark.parametrize("end", ["envoy", "builtin"])
@pytest.mark.parametrize("allow", ["", "ns/demo/sa/*"])
async def test_each_start_says_it(end: str, allow: str, certificates: Path) -> None:
    if end == "envoy":
        find_envoy()
    environ = {
        "HBONE_INBOUND": end,
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_CERTS": str(certificates),
        "HBONE_ALLOW": allow,
        "XDS_ADDR": "istiod.istio-system.svc:15012",
    }
    async with krun(environ=environ) as it:
        port = (await it.process.said(r"^mTLS end: .*15003: 127\.0\.0\.1:(\d+)$"))[1]
        it.process.send(signal.SIGTERM)
        _, _, err = await it.process.ended()
    found = [json.loads(line) for line in err.splitlines() if "AuthorizationPolicy" in line]
    assert [line["severity"] for line in found] == ([] if allow else ["WARNING"])
    for line in found:
        assert f"through the mTLS end on 127.0.0.1:{port};" in line["message"]
