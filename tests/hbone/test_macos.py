"""Nothing that only Linux has is imported or called on hbone's way."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import EXIT_OK, EXIT_SIGTERM, EXIT_UNAVAILABLE
from tests.hbone.commands import Ended, running
from tests.hbone.test_destination import HOST, World, a_token
from tests.hbone.test_destination import world as world
from tests.support.api_server import kubeconfig
from tests.support.connect_proxy import ConnectProxy
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port
from tests.support.network import free_port
from tests.support.tcp_peer import TcpPeer

ON_MACOS = (str(Path(__file__).with_name("on_macos.py")),)
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.shows_secret  # gcloud is asked for one


def modules() -> list[str]:
    """hbone's, without the stand-in for Cloud Run and the demo, which runs krun."""
    found = (path.relative_to(ROOT).with_suffix("") for path in ROOT.joinpath("hbone").rglob("*.py"))
    names = (".".join(path.parts) for path in found if path.name not in ("__main__", "__init__"))
    return sorted(name for name in names if not name.startswith(("hbone.demo.", "hbone.cloudrun.")))


def test_every_module_of_hbone_can_be_imported() -> None:
    asked = [sys.executable, *ON_MACOS, "--import", *modules()]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_test_can_fail() -> None:
    told = "from tests.hbone.on_macos import become_a_mac as b; b(); "
    for fault, says in (
        ("import shared.net.relay.splice", "has no attribute 'EPOLLIN'"),
        ("open('/proc/self/stat')", "it opens /proc/self/stat"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", told + fault], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert (ran.returncode != 0, says in ran.stderr) == (True, True), ran.stderr


async def test_a_tunnel_without_tls() -> None:
    async with Service.listening() as service:
        url = f"http://127.0.0.1:{service.port}/_hbone/22"
        async with running(url, python=ON_MACOS) as command:
            await command.send(b"SSH-2.0-here\r\n")
            stream = await service.request()
            stream.respond(200)
            assert await stream.read(14) == b"SSH-2.0-here\r\n"
            await stream.send(b"SSH-2.0-there\r\n")
            stream.end()
            command.end()
            assert await command.ended() == Ended(EXIT_OK, b"SSH-2.0-there\r\n", "")


async def test_a_service_of_the_cluster_through_a_proxy_with_gcloud_s_token(world: World) -> None:
    """With a client certificate towards the cluster, which Python's ssl takes from files only."""
    pair = world.cluster.authority.issue(dns_names=("me",), server=False)
    access = json.loads(kubeconfig(world.cluster))
    user = {"client-certificate-data": pair.certificate_pem, "client-key-data": pair.key_pem}
    access["users"][0]["user"] = {name: base64.b64encode(pem).decode() for name, pem in user.items()}
    (world.folder / "kubeconfig").write_text(json.dumps(access))
    world.gcloud.prints(identity=(token := a_token()))
    temporary = world.folder / "tmp"
    temporary.mkdir()
    async with ConnectProxy.listening(world.service.port) as proxy:
        environ = {**world.environ, "HTTPS_PROXY": proxy.url, "TMPDIR": str(temporary)}
        for _ in range(2):  # the second time with what was kept
            async with running(
                "-v", "hello.demo:22", "--ca", world.folder / "ca.pem", environ=environ, python=ON_MACOS
            ) as command:
                stream = await world.service.request()
                stream.respond(200, end=True)
                command.end()
                ended = await command.ended()
            assert (ended.code, ended.stdout) == (EXIT_OK, b""), ended.stderr
            assert stream[b"authorization"] == f"Bearer {token}".encode()
    assert len(world.cluster.asked) == len(world.gcloud.asked) == 1
    assert list(temporary.iterdir()) == [], "the key is gone again"
    assert list((world.folder / "home/Library/Caches/hbone").iterdir())
    assert HOST.encode() in proxy.asked[0]


@pytest.mark.parametrize("ends_first", ["client", "service", "reset"])
async def test_a_forwarded_port(world: World, ends_first: str) -> None:
    port = free_port()
    to = world.arguments("hello.demo", "--no-token", "-L", f"{port}:DB")
    async with running("forward", *to, environ=world.environ, python=ON_MACOS) as command:
        (await world.service.request()).respond(405, end=True)  # a GET: is the target there?
        await command.says("ready")
        client = await TcpPeer.connect(port)
        await client.send(b"select 1")
        stream = await world.service.request()
        stream.respond(200)
        assert await stream.read(8) == b"select 1"
        await stream.send(b"1")
        assert await client.read(1) == b"1"
        if ends_first == "client":
            client.end()
            assert await stream.rest() == b""
            stream.end()
            assert await client.rest() == b""
        elif ends_first == "service":
            stream.end()
            assert await client.rest() == b""
            client.end()
            assert await stream.rest() == b""
        else:
            client.reset()
            await stream.broken()
        await client.close()
        command.signal(signal.SIGTERM)
        assert (await command.ended()).code == EXIT_SIGTERM


async def test_a_service_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{closed_port()}/_hbone/22"
    async with running(url, python=ON_MACOS) as command:
        ended = await command.ended()
    assert (ended.code, "connection refused" in ended.stderr) == (EXIT_UNAVAILABLE, True)


@pytest.mark.parametrize("asked", [("--help",), ("version", "--json"), ("complete", "services"), ("doctor",)])
async def test_other_commands(asked: tuple[str, ...]) -> None:
    async with running(*asked, python=ON_MACOS) as command:
        command.end()
        ended = await command.ended()
    assert (ended.code in (EXIT_OK, 64), "Traceback" in ended.stderr) == (True, False), ended.stderr
