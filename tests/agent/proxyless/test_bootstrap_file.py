"""The file that whole kruns make, and what gRPC itself makes of it. With istiod: tests/mesh."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from shared.credentials.certificates.authority import Authority
from shared.trust.spiffe import SpiffeId
from tests.support.gke_server import Machine
from tests.support.network import closed_port
from tests.support.network_namespace import NoNetworkError, network
from tests.support.process import started

ISTIOD = "istiod.istio-system.svc:15012"

SHOW = [sys.executable, "-c", "import os; print(open(os.environ['GRPC_XDS_BOOTSTRAP']).read())"]

CALL = [
    sys.executable,
    "-c",
    """
import grpc
with grpc.insecure_channel("xds:///hello.demo:80") as channel:
    try:
        channel.unary_unary("/A/B")(b"", timeout=20)
    except grpc.RpcError as error:
        print(error.code().name, error.details())
""",
]
"""An app that asks whatever control plane the file names. Nobody answers here."""


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    authority = Authority.create("mesh.local")
    folder = tmp_path / "certs"
    authority.write(folder, authority.issue(SpiffeId.of_workload("mesh.local", "demo", "hello")))
    return folder


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """No network but loopback, so that no name is found and nobody is asked."""
    try:
        with network(tmp_path):
            yield
    except NoNetworkError as error:
        pytest.skip(str(error))


async def krun(*command: str, **environ: str) -> tuple[int, str, str]:
    """Its exit code, what its app has printed, and its log."""
    told = {
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_INBOUND": "none",
        "HBONE_STARTUP_PROBE": "-",
        "HBONE_LOG_FORMAT": "text",
        **environ,
    }
    async with started("agent", *command, environ=told) as process:
        return await process.ended()


async def test_the_app_finds_it_by_the_variable(certificates: Path) -> None:
    code, out, err = await krun(*SHOW, HBONE_GRPC="on", XDS_ADDR=ISTIOD, HBONE_CERTS=str(certificates))
    assert code == 0, err
    made = json.loads(out)
    files = made["certificate_providers"]["default"]["config"]
    assert files["certificate_file"] == str(certificates / "certificates.pem")
    assert made["node"]["metadata"]["NAMESPACE"] == "demo", "as the certificate says"


async def test_only_its_owner_may_read_it_and_it_ends_with_krun(certificates: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "bootstrap.json"
    look = [sys.executable, "-c", "import os; print(os.stat(os.environ['GRPC_XDS_BOOTSTRAP']).st_mode)"]
    told = {"GRPC_XDS_BOOTSTRAP": str(path), "XDS_ADDR": ISTIOD, "HBONE_CERTS": str(certificates)}
    code, out, err = await krun(*look, **told)
    assert (code, stat.S_IMODE(int(out))) == (0, 0o600), err
    assert not path.exists()


async def test_old_versions_of_grpc_are_told_to_use_what_is_in_it(certificates: Path) -> None:
    told = {"HBONE_GRPC": "on", "XDS_ADDR": ISTIOD, "HBONE_CERTS": str(certificates)}
    app = ["sh", "-c", "echo $GRPC_XDS_EXPERIMENTAL_RBAC $GRPC_XDS_EXPERIMENTAL_SECURITY_SUPPORT"]
    assert (await krun(*app, **told))[1] == "true true\n"
    assert (await krun(*app, **told, GRPC_XDS_EXPERIMENTAL_RBAC="false"))[1] == "false true\n"


async def test_what_is_missing_is_said_in_one_line(certificates: Path, tmp_path: Path) -> None:
    async def failed(code: int, text: str, **environ: str) -> None:
        ended, _, err = await krun("true", HBONE_GRPC="on", XDS_ADDR=ISTIOD, **environ)
        assert (ended, text in err.splitlines()[-1], "Traceback" in err) == (code, True, False), err

    empty, file = str(tmp_path / "empty"), tmp_path / "file"
    file.touch()
    await failed(69, f"no certificates in {empty}, which gRPC shows istiod", HBONE_CERTS=empty)
    told = {"HBONE_CERTS": str(certificates), "GRPC_XDS_BOOTSTRAP": str(file / "bootstrap.json")}
    await failed(69, "gRPC's bootstrap file cannot be written: ", **told)
    told = {"HBONE_CERTS": str(certificates), "ISTIO_METAJSON_LABELS": "{"}
    await failed(64, "invalid ISTIO_METAJSON_LABELS (has to be a JSON object)", **told)


@pytest.mark.usefixtures("alone")
async def test_grpc_takes_the_file_for_istiod(certificates: Path) -> None:
    """It looks for the one that the file names, as the node that the file names."""
    told = {
        "HBONE_GRPC": "on",
        "XDS_ADDR": f"nobody.invalid:{closed_port()}",
        "HBONE_CERTS": str(certificates),
    }
    code, out, err = await krun(*CALL, **told, GRPC_DNS_RESOLVER="native")
    assert code == 0, err
    assert out.startswith("UNAVAILABLE "), out
    assert told["XDS_ADDR"] in out and ".demo~demo.svc.cluster.local" in out


# Traffic Director.


async def show(**environ: str) -> tuple[dict[str, Any], str]:
    code, out, err = await krun(*SHOW, **environ)
    assert code == 0, err
    return json.loads(out), err


async def test_project_and_zone_are_the_metadata_server_s() -> None:
    async with Machine() as machine:
        machine.told |= {
            "project/numeric-project-id": "123",
            "instance/zone": "projects/123/zones/us-central1-1",
        }
        made, _ = await show(MESH="td:shop", GCE_METADATA_HOST=machine.host)
        assert made["node"]["id"].startswith("projects/123/networks/mesh:shop/nodes/")
        assert made["node"]["locality"] == {"zone": "us-central1-1"}


async def test_without_a_metadata_server_the_number_has_to_be_told() -> None:
    nowhere = {"MESH": "td:shop", "GCE_METADATA_HOST": f"127.0.0.1:{closed_port()}"}
    code, _, err = await krun(*SHOW, **nowhere)
    assert code == 69
    assert err.splitlines()[-1].endswith(": set PROJECT_NUMBER")
    made, err = await show(**nowhere, PROJECT_NUMBER="5")
    assert made["node"]["locality"] == {}
    assert "Traffic Director is told no zone: " in err


@pytest.mark.usefixtures("alone")
async def test_grpc_takes_the_file_for_traffic_director(tmp_path: Path) -> None:
    """With the default credentials of somebody who does not exist, and where no name is found."""
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "client_email": "nobody@nowhere.iam.gserviceaccount.com",
        "client_id": "1",
    }
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    told = {
        "MESH": "td:shop",
        "PROJECT_NUMBER": "5",
        "GCE_METADATA_HOST": f"127.0.0.1:{closed_port()}",
        "GOOGLE_APPLICATION_CREDENTIALS": str(file),
        "GRPC_DNS_RESOLVER": "native",
    }
    code, out, err = await krun(*CALL, **told)
    assert code == 0, err
    assert out.startswith("UNAVAILABLE "), out
    assert "trafficdirector.googleapis.com:443" in out
    assert "node ID:projects/5/networks/mesh:shop/nodes/" in out
