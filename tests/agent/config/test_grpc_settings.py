"""When krun makes a bootstrap file for gRPC, and for which control plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.grpc_settings import GrpcSettings
from agent.config.mesh_name import TrafficDirector
from agent.config.settings import from_env
from shared.address import Address
from shared.errors import UsageError

ISTIOD = "istiod.istio-system.svc:15012"


def read(**environ: str) -> GrpcSettings | None:
    return from_env(environ).grpc


def asked(**environ: str) -> GrpcSettings:
    grpc = read(**environ)
    assert grpc is not None
    return grpc


def test_nobody_gets_one_unasked() -> None:
    assert read() is None
    assert read(XDS_ADDR=ISTIOD) is None


def test_grpc_s_own_variable_asks_for_one_where_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap.json"
    told = {"GRPC_XDS_BOOTSTRAP": str(file), "XDS_ADDR": ISTIOD}
    assert asked(**told) == GrpcSettings(file=file, istiod=Address.parse(ISTIOD))
    assert read(**told, HBONE_GRPC="off") is None
    assert read(GRPC_XDS_BOOTSTRAP=str(file)) is None, "nobody has said where the control plane is"
    file.touch()
    assert read(**told) is None, "somebody else's"
    assert read(GRPC_XDS_BOOTSTRAP=str(file), MESH="td:shop") is None, "likewise"
    assert asked(**told, HBONE_GRPC="on").file == file


def test_istiod_by_a_name_unless_without_tls() -> None:
    assert asked(HBONE_GRPC="on", XDS_ADDR=ISTIOD).istiod == Address.parse(ISTIOD)
    assert asked(HBONE_GRPC="plaintext", XDS_ADDR="10.0.0.1:15010").istiod == Address("10.0.0.1", 15010)
    with pytest.raises(UsageError, match=r"XDS_ADDR=10\.0\.0\.1:15012: .*has to be a name in it"):
        read(HBONE_GRPC="on", XDS_ADDR="10.0.0.1:15012")
    with pytest.raises(UsageError, match="HBONE_GRPC=on, but neither XDS_ADDR nor MESH=td: is set"):
        read(HBONE_GRPC="on")


def test_traffic_director() -> None:
    grpc = asked(MESH="td:shop", PROJECT_NUMBER="123", GCE_METADATA_HOST="127.0.0.1:1")
    assert grpc.traffic_director == TrafficDirector("123", "mesh:shop")
    assert (grpc.istiod, grpc.metadata_host) == (None, "127.0.0.1:1")
    assert asked(MESH="td:projects=5", PROJECT_NUMBER="123").traffic_director.project_number == "5"
    assert read(MESH="td:shop", HBONE_GRPC="off") is None
    with pytest.raises(UsageError, match="MESH=td:shop: Traffic Director speaks TLS only"):
        read(MESH="td:shop", HBONE_GRPC="plaintext")
