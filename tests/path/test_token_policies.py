"""Rules with claims on the whole path: the metadata server's tokens take hgate through another hgate's port.

    hello and bytes → hgate, with a token for each request → CONNECT → hgate's HBONE port, with rules → app

Tokens and keys are those of the Cloud Run stand-in's metadata server, from a URL and from a file.
"""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hbone.cloudrun.cli import CALLER as EMAIL
from hbone.cloudrun.metadata import KEYS_PATH
from hbone.demo.processes import Process
from shared.address import Address
from shared.trust.jwt_check import GOOGLE_ISSUER
from tests.path.app import App, read
from tests.path.hbone_peers import Hgate, hgate
from tests.support.envoy_config import Json
from tests.support.gateway_world import GLOB
from tests.support.hbone_port import CALLER, GATEWAY, Mesh
from tests.support.hellos import ACCESS_DENIED, hello
from tests.support.world import PATIENCE_S, dump, free_port, printed

AUDIENCE = "https://hgate.example"
OTHER = "other.demo.svc.cluster.local"
NONE = "none.demo.svc.cluster.local"


@contextmanager
def stand_in(folder: Path, metadata: Address) -> Iterator[str]:
    """Its metadata server, each time with new keys; HOST:PORT."""
    folder.mkdir()
    arguments = ["-m", "hbone", "cloudrun", "--log-format", "json", "--dir", str(folder)]
    arguments += ["--listen", "127.0.0.1:0", "--metadata", str(metadata)]
    process = Process("cloudrun", arguments, {}, folder)
    try:
        yield printed(process, "GCE_METADATA_HOST")
    finally:
        assert process.stop() == 0


@contextmanager
def pair(folder: Path, app: App, metadata: str, keys: str, claims: Json) -> Iterator[tuple[Hgate, Hgate]]:
    """The hgate that clients come to, and the one with the rules."""
    mesh = Mesh(folder)
    rule = {"from": [str(CALLER)], "to": [str(app.address)], "claims": claims}
    port = {
        "certificates": str(mesh.member(GATEWAY)),
        "jwt": {"issuer": GOOGLE_ISSUER, "audiences": [AUDIENCE], "keys": keys},
        "rules": [rule],
    }
    near, far = folder / "near", folder / "far"
    with ExitStack() as block:
        for one in (near, far):
            one.mkdir()
        server = block.enter_context(hgate(far, hbone=port))
        route: dict[str, Any] = {
            "tunnel": f"https://{server.hbone}",
            "method": "CONNECT",
            "authority": str(app.address),
            "identity": str(mesh.member(CALLER)),
            "peer": [str(GATEWAY)],
        }
        routes = [
            {"host": OTHER, "token": {"audience": "https://else.example"}, **route},
            {"host": NONE, **route},
            {"host": GLOB, "token": {"audience": AUDIENCE}, **route},
        ]
        environ = {"GCE_METADATA_HOST": metadata}
        yield block.enter_context(hgate(near, routes=routes, environ=environ)), server


def carried(gateway: Hgate, name: str = "hello.demo.svc.cluster.local") -> bytes:
    """What comes back of a hello for `name` and what follows it."""
    with gateway.connect() as client:
        client.sendall(hello(f"outbound_.80_._.{name}") + b"and more")
        client.shutdown(socket.SHUT_WR)
        return read(client)


def keys_of(metadata: str) -> bytes:
    with urllib.request.urlopen(f"http://{metadata}{KEYS_PATH}", timeout=PATIENCE_S) as answer:
        content: bytes = answer.read()
        return content


def test_the_metadata_server_s_tokens(tmp_path: Path, app: App) -> None:
    claims = {"email": ["*@local.iam.gserviceaccount.com"], "email_verified": ["true"]}
    with (
        stand_in(tmp_path / "issuer", Address("127.0.0.1", 0)) as metadata,
        pair(tmp_path, app, metadata, f"http://{metadata}{KEYS_PATH}", claims) as (near, far),
    ):
        assert EMAIL.endswith("@local.iam.gserviceaccount.com")
        for _ in range(3):
            assert carried(near).endswith(b"and more")
        for name, reason in ((OTHER, "its audience is https://else.example"), (NONE, "carries no token")):
            assert carried(near, name) == ACCESS_DENIED
            line = far.process.wait_for(lambda record: reason in str(record.get("error")), PATIENCE_S)  # noqa: B023
            assert (line["status"], line["flags"], line["identity"]) == (401, "DENY", str(CALLER))
        assert dump(far.admin, "/config")["hbone"]["jwt"]["keys"] == f"http://{metadata}{KEYS_PATH}"


def test_other_claims_and_a_rule_that_is_changed(tmp_path: Path, app: App) -> None:
    with (
        stand_in(tmp_path / "issuer", Address("127.0.0.1", 0)) as metadata,
        pair(tmp_path, app, metadata, f"http://{metadata}{KEYS_PATH}", {"email": ["me@*"]}) as (near, far),
    ):
        assert carried(near) == ACCESS_DENIED
        far.process.wait_for(lambda record: "asks for other claims" in str(record.get("error")), PATIENCE_S)
        far.file.write_text(far.file.read_text().replace("me@*", EMAIL))
        far.process.wait_for(lambda record: "reload: " in str(record.get("message")), PATIENCE_S)
        assert carried(near).endswith(b"and more")


def test_a_file_of_keys_and_an_issuer_that_rotates_them(tmp_path: Path, app: App) -> None:
    """The token that hgate holds is rejected when its key is withdrawn, and a new one takes its place."""
    metadata, keys = Address("127.0.0.1", free_port()), tmp_path / "keys.json"
    with ExitStack() as block:
        with stand_in(tmp_path / "before", metadata) as where:
            keys.write_bytes(keys_of(where))
            near, far = block.enter_context(pair(tmp_path, app, where, str(keys), {}))
            assert carried(near).endswith(b"and more")
        assert carried(near).endswith(b"and more"), "for neither keys nor a token is the issuer asked"
        with stand_in(tmp_path / "after", metadata) as where:
            (tmp_path / "next").write_bytes(keys_of(where))
            (tmp_path / "next").replace(keys)
            until = time.monotonic() + PATIENCE_S
            while '"status":401' not in (tmp_path / "far" / "hgate.log").read_text():
                assert time.monotonic() < until, "the file was not read again"
                assert carried(near).endswith(b"and more"), "no client is refused meanwhile"
            near.process.wait_for(lambda record: record.get("attempts") == 2, PATIENCE_S)
            refused = far.process.wait_for(lambda record: record.get("status") == 401, PATIENCE_S)
            assert "a key that is not known here" in refused["error"]
