"""The `hgate` command: its arguments, its exit codes, and its end as a process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway.cli import run, workers
from gateway.config import cluster_files
from gateway.rules.cluster_rules import ServiceRoute
from shared import version
from shared.address import Address
from shared.command_errors import MAX_SHOWN
from shared.errors import EXIT_CONFIG, EXIT_DENIED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE
from shared.listen import bound_address, listen
from shared.tasks import spawn
from tests.support.gateway_world import tunnel
from tests.support.hellos import INTERNAL_ERROR, NAME, hello
from tests.support.http2_peer import PeerStream, Service
from tests.support.process import Process, started
from tests.support.running_gateway import change_config, write_config
from tests.support.tcp_peer import TcpPeer

GOOD = """\
routes:
  - host: "*.demo.svc.cluster.local"
    tunnel: "https://{service}.a.run.app/_hbone/15003"
  - host: "istiod.istio-system.svc"
    forward: "istiod.istio-system.svc:15012"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "hgate.yaml"
    path.write_text(GOOD)
    return str(path)


# Arguments.


@pytest.mark.parametrize(
    "arguments",
    [["check", "--config"], ["--config", "other", "check", "--config"], ["--check", "--config"]],
)
def test_check_says_that_a_file_is_good(
    file: str, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run([*arguments, file]) == EXIT_OK
    assert capsys.readouterr().out == f"{file}: good, 2 routes\n"


WITH_A_WAY_AROUND = """\
routes: []
hbone:
  certificates: certs
  rules:
    - {from: ["*"], to: ["a.svc:80"]}
    - from: ["*"]
      to: ["db.prod.svc.cluster.local:*"]
      deny: true
    - {from: ["ns/demo/sa/*"], to: ["**.svc:*", "10.0.0.0/8:443"]}
trust_domain: demo.local
"""

AROUND = (
    "hbone.rules[1]: denies names, but rules[2] (line 9) allows addresses (10.0.0.0/8:443): "
    "a peer that asks for a name's address gets past it. Deny the addresses here, too, "
    'such as "ADDRESS/BITS:443", or allow only names there'
)


def test_check_warns_of_a_way_around_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text(WITH_A_WAY_AROUND)
    assert run(["check", "--config", str(file)]) == EXIT_OK
    out, err = capsys.readouterr()
    assert out == f"{file}: good, 0 routes, 1 warning\n"
    assert err == f"hgate: warning: {file}:6: {AROUND}\n"


def test_check_counts_one_route_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.yaml").write_text('routes: [{host: "**", forward: "127.0.0.1:1"}]')
    assert run(["check", "--config", str(tmp_path / "one.yaml")]) == EXIT_OK
    assert capsys.readouterr().out.endswith("good, 1 route\n")


@pytest.mark.parametrize("arguments", [["check"], ["explain", "--sni", NAME]])
def test_a_mistake_in_the_file(
    mistaken: str, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run([*arguments, "--config", mistaken]) == EXIT_CONFIG
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(mistake_in(mistaken), said.err)


@pytest.fixture
def mistaken(tmp_path: Path) -> str:
    path = tmp_path / "hgate.yaml"
    path.write_text(GOOD.replace("forward:", "forwrad:"))
    return str(path)


def test_check_tells_all_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text("routes:\n- {host: a, forward: b}\n- {host: c, forwad: 'd:1'}\nadmin: on\n")
    assert run(["check", "--config", str(file)]) == EXIT_CONFIG
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"hgate: {file}:2: routes[0].forward: no port: write HOST:PORT",
        f"hgate: {file}:3: routes[1].forwad: unknown field, did you mean forward?",
        f"hgate: {file}:4: admin: no port: write HOST:PORT",
    ]


def test_check_tells_a_hundred_mistakes_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text("routes:\n" + "".join(f"- {{host: a{number}}}\n" for number in range(250)))
    assert run(["check", "--config", str(file)]) == EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines), lines[-1]) == (MAX_SHOWN + 1, "hgate: 150 more mistakes")


def test_check_tells_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text(WITH_WARNINGS)
    assert run(["check", "--config", str(file)]) == EXIT_OK
    said = capsys.readouterr()
    assert said.out == f"{file}: good, 3 routes, 3 warnings\n"
    assert [line.partition(": warning: ")[::2] for line in said.err.splitlines()] == [
        ("hgate", warning) for warning in warnings_of(file)
    ]


WITH_WARNINGS = """\
listen: ['127.0.0.1:0']
routes:
- {host: "**.demo.svc.cluster.local", tunnel: "https://SERVICE.a.run.app/p", token: {file: none.jwt}}
- {host: "*.demo.svc.cluster.local", forward: 'b:1'}
- {host: "other", forward: 'b:1'}
admin: off
metrics: off
health: off
"""


def warnings_of(file: Path) -> list[str]:
    missing = f"{file.parent}/none.jwt cannot be read: No such file or directory"
    shadowed = (
        "is never reached: routes[0], **.demo.svc.cluster.local, matches every name that this one matches"
    )
    return [
        f"{file}:3: routes[0].token.file: {missing}; it has to be there when it is needed",
        f"{file}:3: routes[0].tunnel: has SERVICE, a placeholder of an example: put in your own",
        f"{file}:4: routes[1]: {shadowed}",
    ]


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
async def test_warnings_are_logged_once_at_the_start_and_at_a_reload(
    tmp_path: Path, workers: Sequence[str]
) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text(WITH_WARNINGS)
    async with started("gateway", "--config", str(file), "--log-format", "json", *workers) as process:
        await process.said("^all 2 workers are ready$" if workers else "^ready$")
        before = list(process.messages)
        process.send(signal.SIGHUP)
        await process.said("^reload: 3 routes from ")
        await process.said("is never reached")
        after = process.messages[len(before) :]
        process.send(signal.SIGTERM)
        _, _, rest = await process.ended()
    for said in (before, after):
        assert [message for message in said if message.startswith(f"{file}:")] == warnings_of(file)
    assert "never reached" not in rest


def mistake_in(file: str) -> str:
    return rf"hgate: {re.escape(file)}:5: routes\[1\]\.forwrad: .*forward.*\n"


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--config", "/nonexistent.yaml"]) == EXIT_CONFIG
    assert capsys.readouterr().err == (
        "hgate: /nonexistent.yaml: cannot be read: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense; see hgate --help"),
        (["nonsense"], "argument COMMAND: invalid choice: 'nonsense' (choose from "),
        (["explain"], "one of the arguments --sni --authority is required; see hgate explain --help"),
        (["check", "--workers", "2"], "unrecognized arguments: --workers 2; see hgate --help"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
        (["run", "--log-format", "xml"], "argument --log-format: invalid choice: 'xml'"),
        (["--config"], "argument --config: expected one argument; see hgate --help"),
        (["--conf=file"], "unrecognized arguments: --conf=file"),
    ],
)
def test_a_wrong_argument(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"hgate: {error}")


@pytest.mark.parametrize("text", ["0", "-1", "many", "257", "1.5", "9" * 5000, ""])
def test_a_number_of_workers_that_is_none(file: str, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert run(["--config", file, "--workers", text]) == EXIT_USAGE
    assert "argument --workers: must be auto or a number in 1..256, not '" in capsys.readouterr().err


def test_a_worker_for_each_cpu() -> None:
    assert workers("auto") == len(os.sched_getaffinity(0))
    assert workers("256") == 256


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["run", "--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == EXIT_OK
    assert capsys.readouterr() == (version.describe("hgate") + "\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["explain", "-h"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == EXIT_OK
    assert capsys.readouterr().out.startswith("usage: hgate ")


# Explaining.


@pytest.mark.parametrize(
    ("name", "code", "tells"),
    [
        (NAME, EXIT_OK, "goes to    POST https://hello.a.run.app/_hbone/15003"),
        ("hello.demo.svc.cluster.local", EXIT_OK, "token      audience https://hello.a.run.app"),
        ("hello.demo.svc.cluster.local.", EXIT_OK, "goes to    POST https://hello.a.run.app/_hbone/15003"),
        ("HELLO.Demo.svc.cluster.local", EXIT_OK, "goes to    POST https://hello.a.run.app/_hbone/15003"),
        ("istiod.istio-system.svc", EXIT_OK, "goes to    istiod.istio-system.svc:15012, as it is"),
        ("hello.example.com", EXIT_DENIED, "refused    no route for hello.example.com"),
        ("outbound_.x", EXIT_DENIED, "refused    server name 'outbound_.x': not of the form"),
        ("", EXIT_DENIED, "refused    server name"),
    ],
)
def test_explain(file: str, capsys: pytest.CaptureFixture[str], name: str, code: int, tells: str) -> None:
    assert run(["explain", "--config", file, "--sni", name]) == code
    assert tells in capsys.readouterr().out


BY_CONNECT = """\
hbone: {certificates: ., rules: []}
routes:
  - {host: "*.prod.svc", tunnel: "https://{service}.a.run.app/_hbone/15008", inner: hbone}
"""


@pytest.mark.parametrize(
    ("authority", "code", "tells"),
    [
        ("db.prod.svc:5432", EXIT_OK, "goes to    POST https://db.a.run.app/_hbone/15008"),
        ("elsewhere.svc:80", EXIT_OK, "goes to    elsewhere.svc:80, which is looked up"),
        ("db.prod.svc", EXIT_DENIED, "refused    :authority: no port"),
        ("db.prod.svc:15008", EXIT_DENIED, "refused    :authority: no tunnel leads to port 15008"),
    ],
)
def test_explain_a_connect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], authority: str, code: int, tells: str
) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text(BY_CONNECT)
    assert run(["explain", "--config", str(file), "--authority", authority]) == code
    assert tells in capsys.readouterr().out


def test_explain_the_address_of_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_files.write_routes(tmp_path, [])
    cluster_files.write_addresses(tmp_path, {"10.96.0.7": "db.prod.svc"})
    file = tmp_path / "hgate.yaml"
    file.write_text(f"{BY_CONNECT}cluster: {{allow: [], folder: .}}\n")
    assert run(["explain", "--config", str(file), "--authority", "10.96.0.7:5432"]) == EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("address    10.96.0.7 is db.prod.svc\nauthority  db.prod.svc:5432\n")
    assert "goes to    POST https://db.a.run.app/_hbone/15008" in out


def test_explain_a_connect_that_an_object_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "https://db.a.run.app/_hbone/15008"
    asked_for = ServiceRoute(
        *("db.prod.svc.cluster.local", url, "https://db.a.run.app"),
        method="POST",
        service_account="",
        namespace="prod",
        source="Service prod/db",
        inner="hbone",
    )
    cluster_files.write_routes(tmp_path, [asked_for])
    file = tmp_path / "hgate.yaml"
    allow = '[{namespace: prod, hosts: ["**.run.app"]}]'
    file.write_text(f"routes: []\ncluster: {{allow: {allow}, folder: .}}\n")
    asked = ["explain", "--config", str(file), "--authority", "db.prod.svc.cluster.local:5432"]
    assert run(asked) == EXIT_DENIED
    assert "has no section hbone" in capsys.readouterr().out
    assert run(["check", "--config", str(file)]) == EXIT_OK
    capsys.readouterr()
    file.write_text(f"{file.read_text()}hbone: {{certificates: ., rules: []}}\n")
    assert run(asked) == EXIT_OK
    assert f"route of Service prod/db: db.prod.svc.cluster.local: matches\ngoes to    POST {url}\n" in (
        capsys.readouterr().out
    )


def test_explain_a_connect_without_a_port_for_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--config", file, "--authority", "a.b:1"]) == EXIT_DENIED
    assert "has no section hbone" in capsys.readouterr().out


def test_the_file_may_stand_before_the_command(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--config", file, "explain", "--sni", NAME]) == EXIT_OK
    assert ": matches" in capsys.readouterr().out


# As a process.


@asynccontextmanager
async def hgate(file: Path, before: Sequence[str] = ()) -> AsyncIterator[tuple[Process, int]]:
    """A running hgate, started by the command `before`, and its port."""
    arguments = ("--config", str(file), "--log-format", "json")
    async with started("gateway", *arguments, before=before) as process:
        port = int((await process.said(r"^listening on 127\.0\.0\.1:(\d+)$"))[1])
        await process.said("^ready$")
        yield process, port


@asynccontextmanager
async def opened(port: int, service: Service) -> AsyncIterator[tuple[TcpPeer, PeerStream]]:
    """A tunnel through a running hgate."""
    said = hello()
    async with TcpPeer.connected(port) as client:
        await client.send(said)
        stream = await service.request()
        stream.respond(200)
        assert await stream.read(len(said)) == said
        yield client, stream


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service.listening() as service:
        yield service


@pytest.fixture
def to_service(tmp_path: Path, service: Service) -> Path:
    """A gateway's file with a route to the service."""
    write_config(tmp_path / "hgate.yaml", [tunnel(service.port)])
    return tmp_path / "hgate.yaml"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_in_order(to_service: Path, service: Service, signum: int) -> None:
    async with hgate(to_service) as (process, port), opened(port, service) as (client, stream):
        process.send(signum)
        await process.said("^draining: 1 connections have up to 20 s$")
        await client.send(b"bye")
        client.end()
        assert await stream.rest() == b"bye"
        stream.end()
        assert await client.rest() == b""
        code, out, _ = await process.ended()
    assert code == EXIT_OK
    assert re.findall(r'"flags":"(.*?)"', out) == ["-"]


async def test_its_end_loses_no_byte_of_a_finished_tunnel(to_service: Path, service: Service) -> None:
    async with hgate(to_service) as (process, port), opened(port, service) as (client, stream):
        client.pause()
        client.end()
        assert await stream.rest() == b""
        sent = await stream.fill()
        process.send(signal.SIGTERM)
        await process.said("^draining: ")
        stream.end()
        await process.line()  # the tunnel is over, but its client has not read yet
        client.resume()
        assert len(await client.rest()) == sent
        assert (await process.ended())[0] == EXIT_OK


async def test_its_end_tells_a_client_that_is_waiting(tmp_path: Path, service: Service) -> None:
    file = tmp_path / "hgate.yaml"
    write_config(file, [tunnel(service.port)], drain_timeout="100ms")
    async with hgate(file) as (process, port), TcpPeer.connected(port) as client:
        await client.send(hello())
        await service.request()
        process.send(signal.SIGTERM)
        assert await client.rest() == INTERNAL_ERROR
        code, out, _ = await process.ended()
    assert code == EXIT_OK
    assert re.findall(r'"flags":"(.*?)"', out) == ["STOPPED"]


@pytest.mark.parametrize("purpose", ["listen", "admin"])
async def test_a_port_in_use(tmp_path: Path, purpose: str) -> None:
    taken = await listen(Address("127.0.0.1", 0), asyncio.Protocol, purpose="test")
    address = str(bound_address(taken))
    file = tmp_path / "hgate.yaml"
    write_config(file, [])
    change_config(file, **{purpose: [address] if purpose == "listen" else address})
    async with started("gateway", "run", "--config", str(file)) as process:
        code, _, err = await process.ended()
    assert code == EXIT_UNAVAILABLE
    assert err.splitlines()[-1] == f"hgate: {purpose}: cannot listen on {address}: the port is in use"
    taken.close()


async def test_a_mistake_in_the_file_prevents_the_start(mistaken: str) -> None:
    async with started("gateway", "--config", mistaken) as process:
        code, out, err = await process.ended()
    assert (code, out) == (EXIT_CONFIG, "")
    assert re.fullmatch(mistake_in(mistaken), err)


async def test_a_metadata_host_that_is_none(file: str) -> None:
    environ = {"GCE_METADATA_HOST": "http://metadata"}
    async with started("gateway", "--config", file, environ=environ) as process:
        code, _, err = await process.ended()
    assert code == EXIT_USAGE
    assert err.startswith("hgate: invalid GCE_METADATA_HOST=http://metadata (")


async def test_more_connections_than_the_usual_limit_of_files(to_service: Path, service: Service) -> None:
    """The usual soft limit of 1024 files is far below max_connections."""
    limited = ["sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh"]
    async with AsyncExitStack() as block:
        process, port = await block.enter_async_context(hgate(to_service, before=limited))
        for _ in range(100):
            await block.enter_async_context(TcpPeer.connected(port))
        client, stream = await block.enter_async_context(opened(port, service))
        await stream.send(b"hello")
        assert await client.read(5) == b"hello"
        process.send(signal.SIGTERM)


async def test_out_of_files(to_service: Path, service: Service) -> None:
    """Where the hard limit is too low as well, some clients are turned away, and the rest goes on."""
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    async with AsyncExitStack() as block:
        _, port = await block.enter_async_context(hgate(to_service, before=limited))
        client, stream = await block.enter_async_context(opened(port, service))
        async with AsyncExitStack() as crowd:
            for _ in range(100):
                await crowd.enter_async_context(TcpPeer.connected(port))
            await stream.send(b"hello")
            assert await client.read(5) == b"hello"
        while not await is_served(port, service):
            pass  # it has not seen yet that the crowd has gone


async def is_served(port: int, service: Service) -> bool:
    """Whether a new connection is carried; else it is closed."""
    async with TcpPeer.connected(port) as client:
        await client.send(hello())
        request = spawn(service.request(), name="the service's request")
        closed = spawn(client.was_reset(), name="the client's end")
        await asyncio.wait({request, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if request.done():
            return True
        request.cancel()
        return False
