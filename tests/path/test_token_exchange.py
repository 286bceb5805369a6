"""Envoy as a client of krun's token exchange: a control plane that it reaches with Google's tokens.

gRPC's own STS client, which Envoy has in it (`google_grpc`, `sts_service`), brings the token in a file to the
exchange, and what it gets in the `authorization` of its request to the control plane, here a port that looks
at nothing else.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from agent.identity.sts_server import JWT, StsServer
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.listen import bound_address, listen
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.net.tls.contexts import server_context
from tests.agent.identity.test_sts_server import SUBJECT, Exchanges
from tests.support.world import PATIENCE_S, find_envoy


class ControlPlane:
    """Hears who comes, and says nothing."""

    def __init__(self) -> None:
        self.authorization: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.connections: list[Connection] = []

    def accept(self) -> Connection:
        self.connections.append(Connection(client=False, on_request=self._asked))
        return self.connections[-1]

    def _asked(self, stream: Stream) -> None:
        headers = dict(stream.headers)
        if not self.authorization.done():
            self.authorization.set_result(headers.get(b"authorization", b"").decode())


def bootstrap(control_plane: Address, sts: Address, folder: Path) -> str:
    """Envoy with nothing but a control plane."""
    exchange = {
        "token_exchange_service_uri": f"http://{sts}/token",
        "subject_token_path": str(folder / "subject"),
        "subject_token_type": JWT,
        "scope": "https://www.googleapis.com/auth/cloud-platform",
    }
    grpc = {
        "target_uri": str(control_plane),
        "stat_prefix": "control_plane",
        "channel_credentials": {"ssl_credentials": {"root_certs": {"filename": str(folder / "ca.pem")}}},
        "call_credentials": [{"sts_service": exchange}],
    }
    ads = {"api_type": "GRPC", "transport_api_version": "V3", "grpc_services": [{"google_grpc": grpc}]}
    return json.dumps(
        {
            "node": {"id": "test", "cluster": "test"},
            "dynamic_resources": {
                "ads_config": ads,
                "lds_config": {"ads": {}, "resource_api_version": "V3"},
            },
        }
    )


async def test_envoy_reaches_its_control_plane_with_the_exchanged_token(tmp_path: Path) -> None:
    envoy = find_envoy()
    authority = Authority.create("control-plane.example")
    own = authority.issue(ip_addresses=["127.0.0.1"])
    for name, content in {
        "ca.pem": authority.root_pem,
        "crt.pem": own.certificate_pem,
        "key.pem": own.key_pem,
        "subject": SUBJECT.encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
    plane, exchanges = ControlPlane(), Exchanges()
    exchanges.gate.set()
    listener = await listen(
        Address("127.0.0.1", 0),
        plane.accept,
        purpose="control plane",
        tls=server_context(tmp_path / "crt.pem", tmp_path / "key.pem"),
    )
    sts = StsServer(exchanges, now=lambda: 1_800_000_000.0)
    configuration = bootstrap(bound_address(listener), await sts.start(Address("127.0.0.1", 0)), tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(str(envoy), "--config-yaml", configuration, "--use-dynamic-base-id", "--concurrency", "1"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await plane.authorization == "Bearer access-token"
    finally:
        process.kill()
        await process.wait()
        listener.close()
        for connection in plane.connections:
            connection.abort("the test is over")
        await sts.close(0)
    assert ("access", SUBJECT) in exchanges.asked
