"""gRPC's bootstrap file for the app, made before the app starts.

gRPC reads it once, at the first `xds:///`. The certificate is not in it: gRPC follows the files that it
names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from agent.config.grpc_settings import GrpcSettings
from agent.config.own_identity import own_identity
from agent.config.settings import Settings
from agent.mesh.platform import Platform
from agent.mtls.own_address import own_address
from agent.proxyless.bootstrap import Bootstrap, for_istiod, for_traffic_director
from shared.atomic_files import PRIVATE_MODE, write_atomically
from shared.errors import UnavailableError
from shared.net.tls import certificate_folder

log = logging.getLogger("hbone.mesh")

FILE = "grpc-bootstrap.json"


class BootstrapFile:
    """The file, from `start` to `close`."""

    def __init__(self, settings: Settings, grpc: GrpcSettings) -> None:
        """`grpc` is `settings`' own."""
        self._settings = settings
        self._grpc = grpc
        self._folder: Path | None = None
        self.path = Path()
        """Where it is, once `start` has returned."""

    async def start(self) -> None:
        """Writes the file, which only the certificate's owner may read.

        Raises:
            UnavailableError: there are no certificates, or the file cannot be written; for Traffic Director
                also if the metadata server is needed and does not answer.
            DeniedError: the certificate names no workload.
            UsageError: ISTIO_METAJSON_* has no JSON.
        """
        content = await self._content()
        authority = self._settings.authority
        owner = None if authority is None else authority.owner
        try:
            path = self._place(owner)
            write_atomically(path, json.dumps(content, indent=2).encode(), PRIVATE_MODE, owner)
        except OSError as error:
            raise UnavailableError(f"gRPC's bootstrap file cannot be written: {error}") from error
        self.path = path
        log.info("gRPC's bootstrap file: %s, for %s", self.path, content["xds_servers"][0]["server_uri"])

    def close(self) -> None:
        """Removes it: the next krun may have another address, and leaves a file alone that is there."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif self.path != Path():
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _place(self, owner: tuple[int, int] | None) -> Path:
        """Raises OSError."""
        if self._grpc.file is not None:
            path = self._grpc.file.absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            return path
        self._folder = Path(tempfile.mkdtemp(prefix="krun-grpc-"))
        if owner is not None:
            os.chown(self._folder, *owner)
        return self._folder / FILE

    async def _content(self) -> Bootstrap:
        settings, grpc = self._settings, self._grpc
        address = own_address(grpc.istiod)
        certificates = certificate_folder.find(settings.certificates)
        if grpc.istiod is None:
            return await self._for_traffic_director(address)
        plaintext = grpc.mode == "plaintext"
        if not certificates.complete:
            if not plaintext:
                raise UnavailableError(
                    f"HBONE_GRPC: no certificates in {settings.certificates}, which gRPC shows istiod: set "
                    "HBONE_CERTS, or HBONE_CA=istio; HBONE_GRPC=off makes no file for gRPC"
                )
            return for_istiod(grpc.istiod, settings.pilot, None, None, address=address, plaintext=True)
        identity = own_identity(settings.certificates)
        return for_istiod(
            grpc.istiod, settings.pilot, identity, certificates, address=address, plaintext=plaintext
        )

    async def _for_traffic_director(self, address: str) -> Bootstrap:
        platform = Platform(self._grpc.metadata_host)
        name = self._grpc.traffic_director
        if not name.project_number:
            name = dataclasses.replace(name, project_number=await platform.project_number())
        try:
            zone = await platform.zone()
        except UnavailableError as error:
            log.warning("Traffic Director is told no zone: %s", str(error).partition(": set ")[0])
            zone = ""
        certificates = certificate_folder.find(self._settings.certificates)
        return for_traffic_director(name, certificates, zone=zone, address=address)
