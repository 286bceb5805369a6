"""Settings for apps whose gRPC asks the mesh's control plane itself (`xds:///...`), without a proxy.

GRPC_XDS_BOOTSTRAP is gRPC's own variable, and the original's: the file that says where the control plane is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agent.config import mesh_name
from agent.config.certificate_settings import CertificateSettings
from agent.config.mesh_name import TrafficDirector
from shared.address import Address
from shared.config.fields import Environment, Setting, setting, table_of
from shared.config.kinds import Choice, FilePath
from shared.credentials.token_sources import token_settings
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import UsageError

Grpc = Literal["auto", "on", "plaintext", "off"]
"""Whether there is to be a file, and whether istiod is asked without TLS: see `GrpcSettings.mode`."""

GRPC: tuple[Grpc, ...] = get_args(Grpc)

VARIABLE = "GRPC_XDS_BOOTSTRAP"


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """All about the file; there is one only if krun is to make it."""

    mode: Grpc = setting(
        Choice(GRPC),
        "auto",
        "whether the app's gRPC gets a bootstrap file for xds:///: auto, on, plaintext or off",
        f"auto makes it with MESH=td:, and if {VARIABLE} names a file that is not there and XDS_ADDR is set. "
        "gRPC shows istiod the certificate in HBONE_CERTS; plaintext is for istiod's port 15010, which has "
        "no TLS.",
        variable="HBONE_GRPC",
    )
    file: Path | None = setting(
        FilePath(),
        None,
        "where the app's gRPC reads its bootstrap file, which krun makes",
        "A file that is there already is replaced only with HBONE_GRPC=on or plaintext.",
        unset="a temporary file",
        variable=VARIABLE,
    )
    istiod: Address | None = None
    """XDS_ADDR; None: Traffic Director is asked."""

    traffic_director: TrafficDirector = field(default_factory=TrafficDirector)
    metadata_host: str = token_settings.DEFAULT_METADATA_HOST
    """Who is asked for what `traffic_director` lacks."""


def read(read: Environment, mesh: str, xds: Address | None) -> GrpcSettings | None:
    """The settings that `read` finds, `mesh` being MESH's value; None: krun makes no file. Raises
    UsageError."""
    given = read.given(GrpcSettings)
    mode, file = given.get("mode", "auto"), given.get("file")
    name = mesh_name.parse(mesh)
    if mode == "off" or (mode == "auto" and file is not None and os.path.exists(file)):
        return None
    if isinstance(name, TrafficDirector):
        if mode == "plaintext":
            raise UsageError(f"HBONE_GRPC=plaintext, but MESH={mesh}: Traffic Director speaks TLS only")
        number = name.project_number or read(table_of(TokenSettings)["project_number"])
        return GrpcSettings(
            traffic_director=TrafficDirector(number, name.network),
            metadata_host=read(table_of(CertificateSettings)["metadata_host"]),
            **given,
        )
    if mode == "auto" and (file is None or xds is None):
        return None
    if xds is None:
        raise UsageError(
            f"HBONE_GRPC={mode}, but neither XDS_ADDR nor MESH=td: is set: where is the control plane?"
        )
    if xds.is_ip and mode != "plaintext":
        raise UsageError(
            f"XDS_ADDR={xds}: gRPC compares istiod's certificate with this host, which has to be a name in "
            "it, such as istiod.istio-system.svc; HBONE_GRPC=off makes no file for gRPC"
        )
    return GrpcSettings(istiod=xds, **given)


SETTINGS: tuple[Setting[Any], ...] = tuple(table_of(GrpcSettings).values())
