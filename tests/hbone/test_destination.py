"""Services by name, and gcloud's tokens, from the command line to the request that the service gets."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hbone import arguments, destination
from hbone.token_choice import GCLOUD_AUDIENCE
from shared.cluster.service_annotations import AUDIENCE, URL
from shared.credentials.certificates.authority import Authority
from shared.credentials.tokens.tokens import NoToken
from shared.errors import EXIT_DENIED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE, UsageError
from shared.net.tls.contexts import server_context
from tests.hbone.commands import Ended, output_of, running
from tests.support.api_server import LocalApiServer, kubeconfig
from tests.support.connect_proxy import ConnectProxy
from tests.support.gcloud_command import GcloudCommand
from tests.support.google import Google
from tests.support.http2_peer import Service
from tests.support.metadata_server import unsigned_token
from tests.support.run_api import RunApi

HOST = "hello-abcdefghij-uc.a.run.app"
FAR = 4102444800

pytestmark = pytest.mark.shows_secret  # gcloud is asked for one


class World:
    """A cluster with the Service demo/hello, which leads to `service`, and a person with gcloud."""

    def __init__(self, cluster: LocalApiServer, service: Service, folder: Path) -> None:
        self.cluster, self.service, self.folder = cluster, service, folder
        self.annotations = {URL: f"https://{HOST}"}
        self.gcloud = GcloudCommand(folder)
        (folder / "kubeconfig").write_text(kubeconfig(cluster))
        cluster.answer = lambda asked: (
            (200, json.dumps({"metadata": {"annotations": self.annotations}}).encode())
            if asked.path == "/api/v1/namespaces/demo/services/hello"
            else None
        )

    @property
    def environ(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        # The metadata server is not looked for, and gcloud is found.
        told = {"KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(home), "HBONE_TOKENS": "gcloud"}
        return {**self.gcloud.environ, **told}

    def arguments(self, text: str, *flags: object) -> tuple[object, ...]:
        return (text, "--ca", self.folder / "ca.pem", "--connect", f"127.0.0.1:{self.service.port}", *flags)

    async def tunnel(self, text: str = "hello.demo:22", *flags: object, refused: int = 0) -> str:
        """The authorization of a tunnel's request; before it `refused` others are answered with 401."""
        async with running(*self.arguments(text, *flags), environ=self.environ) as command:
            for _ in range(refused):
                (await self.service.request()).respond(401, end=True)
            stream = await self.service.request()
            stream.respond(200, end=True)
            command.end()
            assert await command.ended() == Ended(EXIT_OK, b"", "")
            assert (stream[b":authority"], stream[b":path"]) == (HOST.encode(), b"/_hbone/22")
            return dict(stream.fields).get(b"authorization", b"").decode().removeprefix("Bearer ")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    authority = Authority.create("demo")
    (tmp_path / "ca.pem").write_bytes(authority.root_pem)
    pair = authority.issue(dns_names=("*.a.run.app", "www.example.com"), client=False)
    (tmp_path / "pair.pem").write_bytes(pair.certificate_pem + pair.key_pem)
    context = server_context(tmp_path / "pair.pem", tmp_path / "pair.pem")
    async with LocalApiServer() as cluster, Service.listening(context) as service:
        yield World(cluster, service, tmp_path)


def a_token(audience: str = GCLOUD_AUDIENCE, **claims: object) -> str:
    return unsigned_token(aud=audience, exp=FAR, **claims)


async def test_a_service_of_the_cluster_with_gcloud_s_token(world: World) -> None:
    world.gcloud.prints(identity=(token := a_token()))
    assert await world.tunnel() == token
    assert len(world.gcloud.asked) == len(world.cluster.asked) == 1
    assert await world.tunnel() == token
    assert len(world.gcloud.asked) == len(world.cluster.asked) == 1, "both are kept"
    told = [one.headers.get("authorization") for one in world.cluster.asked]
    assert told == [f"Bearer {world.cluster.allowed}"], "the cluster never sees the service's token"
    kept = list((world.folder / "home/.cache/hbone").iterdir())
    assert {oct(file.stat().st_mode & 0o777) for file in kept} == {"0o600"}


async def test_connect_by_name_leads_to_ssh(world: World) -> None:
    assert await world.tunnel("connect", "hello.demo", "--no-token") == ""
    ended = await output_of(*world.arguments("hello.demo"), environ=world.environ)
    assert (ended.code, ended.stderr.startswith("hbone: hello.demo: no command, and no port")) == (64, True)


async def test_forward_takes_a_service_without_a_port(world: World) -> None:
    to = world.arguments("hello.demo", "--no-token", "-L", "0:DB")
    async with running("forward", *to, environ=world.environ) as command:
        stream = await world.service.request()
        assert (stream[b":authority"], stream[b":path"]) == (HOST.encode(), b"/_hbone/DB")
        stream.respond(404, end=True)
        ended = await command.ended()
    assert (ended.code, "answered 404" in ended.stderr) == (EXIT_UNAVAILABLE, True), ended.stderr
    to = world.arguments("hello.demo", "--no-token", "-L", "0")
    ended = await output_of("forward", *to, environ=world.environ)
    assert (ended.code, "no target; write [ADDR:]PORT:TARGET" in ended.stderr) == (EXIT_USAGE, True)


async def test_a_kept_token_that_is_refused_is_replaced_once(world: World) -> None:
    world.gcloud.prints(identity=a_token(n=1))
    await world.tunnel()
    world.gcloud.prints(identity=(new := a_token(n=2)))
    assert await world.tunnel(refused=1) == new
    assert await world.tunnel() == new
    async with running(*world.arguments(f"https://{HOST}/_hbone/22"), environ=world.environ) as command:
        for _ in range(2):
            (await world.service.request()).respond(401, end=True)
        ended = await command.ended()
    assert (ended.code, "answered 401" in ended.stderr) == (EXIT_DENIED, True)


async def test_a_kept_token_is_not_another_login_s(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of gcloud's properties may be a variable, also those that say as whom."""
    world.gcloud.prints(identity=a_token(n=1))
    await world.tunnel()
    monkeypatch.setenv("CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT", "sa@proj.iam.gserviceaccount.com")
    world.gcloud.prints(identity=(new := a_token(n=2)))
    assert await world.tunnel() == new


async def test_whoever_names_the_host_gets_no_token_of_unknown_audience(world: World) -> None:
    """Who may annotate the Service could use it elsewhere. Of a URL the host is the user's own choice."""
    file = world.folder / "token"
    for tunnels, token in enumerate(("ya29.opaque", unsigned_token(exp=FAR))):
        file.write_text(token)
        ended = await output_of(
            *world.arguments("hello.demo:22", "--token-file", file), environ=world.environ
        )
        assert (ended.code, len(world.service.connections)) == (EXIT_DENIED, tunnels)
        assert ended.stderr == (
            f"hbone: cannot use token file {file}: it names no audience, and {HOST} is the choice of "
            f"Service demo/hello of context test; if that is right, write https://{HOST}\n"
        )
        assert await world.tunnel(f"https://{HOST}/_hbone/22", "--token-file", file) == token
    file.write_text(token := a_token(f"https://{HOST}"))
    assert await world.tunnel("hello.demo:22", "--token-file", file) == token


async def test_a_new_token_that_is_refused_is_final(world: World) -> None:
    world.gcloud.prints(identity=a_token())
    async with running(*world.arguments("hello.demo:22"), environ=world.environ) as command:
        (await world.service.request()).respond(401, end=True)
        assert (await command.ended()).code == EXIT_DENIED
    assert len(world.gcloud.asked) == 1


@pytest.mark.parametrize("kept", ["services", "none"])
async def test_tokens_are_not_kept_if_told_so(
    world: World, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HBONE_CACHE", kept)
    world.gcloud.prints(identity=a_token())
    for _ in range(2):
        await world.tunnel()
    assert len(world.gcloud.asked) == 2
    assert len(world.cluster.asked) == (1 if kept == "services" else 2)


async def test_a_token_near_its_end_is_not_kept(world: World) -> None:
    world.gcloud.prints(identity=unsigned_token(aud=GCLOUD_AUDIENCE, exp=time.time() + 200))
    for _ in range(2):
        await world.tunnel()
    assert len(world.gcloud.asked) == 2


async def test_a_person_s_token_goes_to_cloud_run_only(world: World) -> None:
    world.gcloud.prints(identity=a_token())
    world.annotations[URL] = "https://www.example.com"
    ended = await output_of(*world.arguments("hello.demo:22"), environ=world.environ)
    assert ended.code == EXIT_DENIED
    assert "a person's login gives one for its own client only" in ended.stderr
    assert (world.gcloud.asked, world.service.connections) == ([], [])


async def test_a_person_s_credentials_file_gives_gcloud_s_token(world: World) -> None:
    """As `gcloud auth login --update-adc` writes it: its client is gcloud's own."""
    async with Google() as google:
        file = world.folder / "adc.json"
        told = {
            "HBONE_TOKENS": "google",
            "GOOGLE_APPLICATION_CREDENTIALS": str(file),
            "HBONE_OAUTH_URL": f"{google.plain_url}/token",
        }
        file.write_text(json.dumps(google.user_file("me@example.com") | {"client_id": "another"}))
        ended = await output_of(*world.arguments("hello.demo:22"), environ=world.environ | told)
        assert ended.code == EXIT_DENIED
        assert "a user's login gives one for its own client only" in ended.stderr
        assert google.requests == []
        file.write_text(json.dumps(google.user_file("me@example.com") | {"client_id": GCLOUD_AUDIENCE}))
        async with running(*world.arguments("hello.demo:22"), environ=world.environ | told) as command:
            stream = await world.service.request()
            token = stream[b"authorization"].decode().removeprefix("Bearer ")
            assert google.claims(token, GCLOUD_AUDIENCE)["sub"] == "me@example.com"
            stream.respond(200, end=True)
            command.end()
            assert (await command.ended()).code == EXIT_OK


async def test_an_annotation_asks_for_no_token_of_others(world: World) -> None:
    world.annotations[AUDIENCE] = "https://payroll.a.run.app"
    ended = await output_of(*world.arguments("hello.demo:22"), environ=world.environ)
    assert ended.code == EXIT_USAGE
    assert f"asks for a token for https://payroll.a.run.app, which is not its host {HOST}" in ended.stderr
    assert (world.gcloud.asked, world.service.connections) == ([], [])
    world.gcloud.configure(account="robot@proj.iam.gserviceaccount.com")
    world.gcloud.prints(identity=(token := a_token("https://payroll.a.run.app")))
    assert await world.tunnel("hello.demo:22", "--audience", "https://payroll.a.run.app") == token
    assert await world.tunnel("hello.demo:22", "--no-token") == ""


async def test_what_is_not_found_is_not_dialled(world: World) -> None:
    ended = await output_of(*world.arguments("www.example:22"), environ=world.environ)
    assert ended.code == EXIT_UNAVAILABLE
    assert ended.stderr.startswith("hbone: no service www.example: context test has no Service example/www;")
    assert (ended.stdout, world.service.connections) == (b"", [])


# What -v shows.


def without_times(stderr: str) -> list[str]:
    told = re.sub(r"\(\d+\.\d ms\)$", "(T)", stderr, flags=re.MULTILINE)
    return re.sub(r"kept for \d+ s", "kept for N s", told).splitlines()


async def test_each_hop_is_shown(world: World) -> None:
    world.gcloud.prints(identity=(token := a_token(email="me@example.com")))
    for flag in ("-v", "-vv"):
        async with running(*world.arguments("hello.demo:22", flag), environ=world.environ) as command:
            stream = await world.service.request()
            stream.respond(200)
            await stream.send(b"SSH-2.0-x\r\n")
            stream.end()
            command.end()
            ended = await command.ended()
        assert (ended.code, ended.stdout) == (EXIT_OK, b"SSH-2.0-x\r\n"), "nothing but the wire"
        assert token not in ended.stderr
        lines = without_times(ended.stderr)
        of_all = [line for line in lines if line.endswith("(T)")]
        kept = ", kept for N s" if flag == "-vv" else ""
        assert of_all == [
            f"hbone: destination: https://{HOST}/_hbone/22, by Service demo/hello of context test (T)",
            f"hbone: token: gcloud's me@example.com{kept} (T)",
            f"hbone: TCP: 127.0.0.1:{world.service.port} (T)",
            "hbone: TLS: TLSv1.3, TLS_AES_256_GCM_SHA384, ALPN h2 (T)",
            "hbone: HTTP/2: the request is sent, with 0 bytes of the input (T)",
            "hbone: answer: 200, the tunnel is open (T)",
            "hbone: first byte: 11 bytes from the container (T)",
        ]
    assert f"hbone: token: audience {GCLOUD_AUDIENCE}, email me@example.com, expires 2100-01-01" in "\n".join(
        lines
    )
    assert [line for line in lines if line.startswith("hbone: certificate: ends 20")]


async def test_why_a_hop_comes_again_is_shown(world: World) -> None:
    to = world.arguments(f"https://{HOST}/_hbone/22", "--no-token", "-v")
    async with running(*to, environ=world.environ) as command:
        (await world.service.request()).respond(503, end=True)
        (await world.service.request()).respond(200, end=True)
        command.end()
        lines = without_times((await command.ended()).stderr)
    again = lines.index("hbone: answer: 503: it is asked once more (T)")
    assert lines[again + 1].startswith("hbone: TCP: ")
    assert lines[-1] == "hbone: answer: 200, the tunnel is open (T)"


async def test_a_cache_that_others_could_change_is_not_used_and_that_is_said(world: World) -> None:
    world.gcloud.prints(identity=a_token())
    environ = world.environ
    caches = world.folder / "home/.cache"
    caches.mkdir()
    caches.chmod(0o775)
    for _ in range(2):
        async with running("-v", *world.arguments("hello.demo:22"), environ=environ) as command:
            (await world.service.request()).respond(200, end=True)
            command.end()
            ended = await command.ended()
        assert ended.code == EXIT_OK
        said = f"hbone: token: it is not kept for the next time: {caches} may be written by others than "
        assert said in ended.stderr
    assert len(world.gcloud.asked) == 2


# Through a proxy.


@pytest.mark.parametrize("command", ["https", "service"])
async def test_a_tunnel_through_the_proxy_of_the_environment(
    world: World, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gcloud.prints(identity=a_token())
    async with ConnectProxy.listening(world.service.port) as proxy:
        environ = world.environ | {"HTTPS_PROXY": f"http://me:pass@127.0.0.1:{proxy.port}"}
        text = "hello.demo:22" if command == "service" else f"https://{HOST}/_hbone/22"
        async with running("-v", text, "--ca", world.folder / "ca.pem", environ=environ) as started:
            (await world.service.request()).respond(200, end=True)
            started.end()
            ended = await started.ended()
        assert ended.code == EXIT_OK
        assert f"hbone: proxy: 127.0.0.1:{proxy.port} answered 200 (T)" in without_times(ended.stderr)
        assert "hbone: DNS" not in ended.stderr, "the proxy looks the name up"
        assert proxy.asked[0].startswith(f"CONNECT {HOST}:443 HTTP/1.1\r\n".encode())
        assert b"\r\nproxy-authorization: Basic bWU6cGFzcw==\r\n" in proxy.asked[0]

        proxy.answer = b"HTTP/1.1 403 Forbidden\r\n\r\n"
        ended = await output_of(text, "--ca", world.folder / "ca.pem", environ=environ)
        said = f"by proxy 127.0.0.1:{proxy.port}: it answered 403: it does not allow {HOST}:443"
        assert (ended.code, said in ended.stderr) == (EXIT_UNAVAILABLE, True)
        monkeypatch.setenv("HTTPS_PROXY", environ["HTTPS_PROXY"])
        await world.tunnel(text)  # with --connect to this machine
        assert len(proxy.asked) == 2


async def test_each_credential_has_one_receiver(world: World) -> None:
    """The table of docs/ssh.md: what each party was sent, all of it."""
    identity, access, password = a_token(), "Access-of-me", "cGFzcw"
    world.gcloud.prints(identity=identity, access=access)
    services = [{"name": "other", "region": "r1", "url": f"https://{HOST}", "namespace": "demo"}]
    async with RunApi(services=services) as api, ConnectProxy.listening(world.service.port) as proxy:
        told = {"HTTPS_PROXY": f"http://me:pass@127.0.0.1:{proxy.port}", "HBONE_RUN_URL": api.url}
        environ = world.environ | told
        async with running("other.demo:22", "--ca", world.folder / "ca.pem", environ=environ) as command:
            stream = await world.service.request()
            stream.respond(200, end=True)
            command.end()
            assert (await command.ended()).code == EXIT_OK
        sent = {
            "cluster": str([one.headers for one in world.cluster.asked]),
            "Cloud Run's API": str([one.headers for one in api.requests]),
            "service": str(stream.fields),
            "proxy": str(proxy.asked),
        }
    secrets = {
        "cluster": world.cluster.allowed,
        "Cloud Run's API": access,
        "service": identity,
        "proxy": password,
    }
    for owner, secret in secrets.items():
        assert [party for party, text in sent.items() if secret in text] == [owner]


# What a command's URL may be.


def options(*flags: str) -> argparse.Namespace:
    return arguments.command_parser("connect").parse_args(["x", "--no-token", *flags])


@pytest.mark.parametrize(
    ("text", "leads_to"),
    [
        ("https://h.example", "https://h.example/_hbone/22"),
        ("https://h.example/", "https://h.example/_hbone/22"),
        ("https://h.example:8443", "https://h.example:8443/_hbone/22"),
        ("https://h.example/_hbone/DB", "https://h.example/_hbone/DB"),
        ("http://127.0.0.1:15009", "http://127.0.0.1:15009/_hbone/22"),
        ("www.h.example", "https://www.h.example/_hbone/22"),
        ("www.h.example:2222", "https://www.h.example/_hbone/2222"),
        ("www.h.example:443/_hbone/DB", "https://www.h.example/_hbone/DB"),
        ("[::1]", "https://[::1]/_hbone/22"),
        ("localhost", "https://localhost/_hbone/22"),
        ("https://h.example/", "https://h.example/_hbone/22"),
    ],
)
async def test_a_host_with_a_default_port(text: str, leads_to: str) -> None:
    found = await destination.find(text, options(), {}, default_port="22")
    assert (str(found), found.found_by) == (leads_to, "")
    assert isinstance(found.token, NoToken)


async def test_a_default_port_of_krun_itself() -> None:
    found = await destination.find("https://h.example", options(), {}, default_port="")
    assert str(found) == "https://h.example/_hbone/"


async def test_a_service_with_and_without_a_default_port(world: World) -> None:
    environ = {**os.environ, **world.environ}
    found = await destination.find("hello.demo", options(), environ, default_port="22")
    assert str(found) == f"https://{HOST}/_hbone/22"
    assert found.found_by == "Service demo/hello of context test"
    found = await destination.find("hello.demo", options(), environ, default_port="")
    assert str(found) == f"https://{HOST}/_hbone/"
    found = await destination.find("hello.demo.svc:DB", options(), environ)
    assert str(found) == f"https://{HOST}/_hbone/DB"
    with pytest.raises(UsageError, match=r"demo: no command, and no port of a service: write hello\.demo:"):
        await destination.find("hello.demo", options(), environ)
    with pytest.raises(UsageError, match="--project and --region are for SERVICE; this is a host"):
        await destination.find("https://h/x", options("--region", "r"), environ)
