"""krun under the mesh's policies: which end its start, which it applies, which it enforces, and what it says
of those that it cannot read or that come later."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.config.settings import Settings, from_env
from agent.policy import mesh_policies
from agent.policy.istio_policies import Policy
from agent.policy.mesh_policies import MeshPolicies
from shared.errors import DeniedError, UnavailableError
from shared.trust.spiffe import SpiffeId
from tests.agent.test_app import Krun, krun
from tests.support.api_server import LocalApiServer, access, kubeconfig
from tests.support.hbone_port import Mesh
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import find_envoy

WEB, GUEST = "demo.local/ns/clients/sa/web", "demo.local/ns/clients/sa/guest"


def policy(name: str, spec: dict[str, Any], namespace: str = "demo") -> dict[str, Any]:
    return {"kind": "AuthorizationPolicy", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def of(action: str, *principals: str) -> dict[str, Any]:
    rules = [{"from": [{"source": {"principals": list(principals)}}]}]
    return {"selector": {"matchLabels": {"app": "hello"}}, "action": action, "rules": rules}


NO_GUESTS = policy("no-guests", of("DENY", GUEST))
WEB_ONLY = policy("web-only", of("ALLOW", WEB))
GET_ONLY = policy("get-only", {"rules": [{"to": [{"operation": {"methods": ["GET"]}}]}]}, "istio-system")
STRICT = {
    "kind": "PeerAuthentication",
    "metadata": {"name": "hello", "namespace": "demo"},
    "spec": {"mtls": {"mode": "STRICT"}},
}


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(tmp_path)


@pytest.fixture
async def server() -> AsyncIterator[LocalApiServer]:
    async with LocalApiServer() as server:
        yield server


def member(mesh: Mesh, name: str) -> Path:
    return mesh.member(SpiffeId.parse(f"spiffe://{name}"))


def environment(mesh: Mesh, folder: Path, server: LocalApiServer) -> dict[str, str]:
    """What leads krun to the policies of demo/hello."""
    (folder / "kubeconfig").write_text(kubeconfig(server, namespace="elsewhere"))
    return {
        "HBONE_INBOUND": "builtin",
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_CERTS": str(member(mesh, "demo.local/ns/demo/sa/hello")),
        "WORKLOAD_NAME": "hello",
        "XDS_ADDR": "istiod.istio-system.svc:15012",
        "KUBECONFIG": str(folder / "kubeconfig"),
    }


async def refused(environ: Mapping[str, str], expected: int = 69) -> str:
    """The one line of a krun that does not start."""
    async with krun("echo", "started", environ={"HBONE_LOG_LEVEL": "warning", **environ}) as it:
        code, out, err = await it.process.ended()
    assert (code, out, err.count("\n")) == (expected, "", 1), err
    return err.strip()


@asynccontextmanager
async def serving(environ: Mapping[str, str]) -> AsyncIterator[tuple[Krun, int]]:
    """A krun that has started before an app that greets, and the port of its mTLS end."""

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()

    app = await asyncio.start_server(greet, "127.0.0.1", 0)
    told = {"HBONE_APP": f"127.0.0.1:{app.sockets[0].getsockname()[1]}", "HBONE_APP_PROTOCOL": "tcp"}
    async with app, krun(environ={**environ, **told}) as it:
        port = (await it.process.said(r"^mTLS end: .*15003: 127\.0\.0\.1:(\d+)$"))[1]
        await it.listening()
        yield it, int(port)
        it.process.send(signal.SIGTERM)  # killed, it would leave its Envoy behind
        await it.process.ended()


async def comes_in(mesh: Mesh, name: str, port: int) -> bool:
    """Whether a peer gets to the app."""
    tls = mesh.tls(member(mesh, name))
    tls.set_alpn_protocols(["istio"])
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            greeting = await reader.read(1)
            writer.transport.abort()
    except OSError:  # TLS's alert, or a reset
        return False
    return greeting == b"x"


# Policies that are not enforced.


async def test_a_policy_that_nobody_enforces_ends_the_start(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    environ = environment(mesh, tmp_path, server)
    under = "krun: demo/hello is under AuthorizationPolicy"
    server.policies = [NO_GUESTS]
    assert await refused(environ) == (
        f"{under} demo/no-guests, which the builtin mTLS end does not enforce: set "
        "HBONE_DENY=ns/clients/sa/guest, or HBONE_POLICY=apply, or set HBONE_POLICY=ignore"
    )
    server.policies = [NO_GUESTS, WEB_ONLY, STRICT]
    assert await refused({**environ, "HBONE_DENY": "ns/x/sa/y"}) == (
        f"{under} demo/no-guests, AuthorizationPolicy demo/web-only, which the builtin mTLS end does not "
        "enforce: set HBONE_ALLOW=ns/clients/sa/web and HBONE_DENY=ns/x/sa/y,ns/clients/sa/guest, or "
        "HBONE_POLICY=apply, or set HBONE_POLICY=ignore"
    )


async def test_one_that_patterns_cannot_say_ends_the_start_with_apply_too(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [GET_ONLY, WEB_ONLY]
    for mode in ("check", "apply"):
        line = await refused({**environment(mesh, tmp_path, server), "HBONE_POLICY": mode})
        assert line.startswith(
            "krun: demo/hello is under AuthorizationPolicy istio-system/get-only (rules[0] is about to, too)"
        )
        assert line.endswith(": set HBONE_INBOUND=pilot-agent, or set HBONE_POLICY=ignore")


async def test_an_allow_list_that_lets_in_more_is_not_replaced(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [WEB_ONLY]
    wide = {"HBONE_ALLOW": "ns/clients/sa/*", "HBONE_POLICY": "apply"}
    line = await refused({**environment(mesh, tmp_path, server), **wide})
    assert line.endswith(": HBONE_ALLOW lets in more than the policies: unset it, or set HBONE_POLICY=ignore")


async def test_where_nobody_may_come_in_nobody_is_proposed(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [policy("nobody", {})]
    environ = environment(mesh, tmp_path, server)
    assert ": set HBONE_DENY=spiffe://demo.local/**, or" in await refused(environ)
    far = {"HBONE_ALLOW": "spiffe://far.local/ns/a/sa/b"}
    lists = "HBONE_DENY=spiffe://demo.local/**,spiffe://far.local/**"
    assert f": set {lists}, or" in await refused({**environ, **far})


async def test_labels_that_istio_s_variable_adds_select_the_workload(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    v2_only = policy("v2", {**of("DENY", GUEST), "selector": {"matchLabels": {"version": "v2"}}})
    server.policies = [v2_only]
    environ = environment(mesh, tmp_path, server) | {"ISTIO_METAJSON_LABELS": '{"version": "v2"}'}
    assert "under AuthorizationPolicy demo/v2, which" in await refused(environ)


async def test_another_root_namespace(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    server.policies = [policy("no-guests", of("DENY", GUEST), "mesh-root")]
    server.may_list = {"demo", "mesh-root"}
    environ = environment(mesh, tmp_path, server) | {"HBONE_ROOT_NAMESPACE": "mesh-root"}
    assert "under AuthorizationPolicy mesh-root/no-guests, which" in await refused(environ)


async def test_plain_text_that_the_mesh_asks_for(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    server.policies = [{**STRICT, "spec": {"mtls": {"mode": "DISABLE"}}}]
    assert "PeerAuthentication demo/hello (its mode is DISABLE, and the mTLS end accepts no plain text)" in (
        await refused(environment(mesh, tmp_path, server))
    )


# Policies that are enforced, or let be.


@pytest.mark.parametrize(
    "environ",
    [
        {"HBONE_ALLOW": "ns/clients/sa/web", "HBONE_DENY": "ns/clients/sa/guest"},
        {"HBONE_ALLOW": f"spiffe://{WEB}", "HBONE_DENY": "ns/clients/sa/g*,ns/*/sa/guest"},
        {"HBONE_DENY": "spiffe://demo.local/**"},
    ],
)
async def test_lists_that_enforce_them(
    environ: dict[str, str], mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [NO_GUESTS, WEB_ONLY, STRICT]
    async with krun(environ={**environment(mesh, tmp_path, server), **environ}) as it:
        told = await it.process.said("^policies of the mesh for demo/hello, all enforced: (.*)$")
        await it.listening()
    named = ["AuthorizationPolicy demo/no-guests", "AuthorizationPolicy demo/web-only"]
    assert told[1].split(", ") == [*named, "PeerAuthentication demo/hello"]


@pytest.mark.parametrize("end", ["envoy", "builtin"])
async def test_they_are_applied(end: str, mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    if end == "envoy":
        find_envoy()
    server.policies = [policy("web-and-guest", of("ALLOW", WEB, GUEST)), NO_GUESTS]
    environ = environment(mesh, tmp_path, server) | {"HBONE_POLICY": "apply"}
    async with serving({**environ, "HBONE_INBOUND": end}) as (it, port):
        assert await comes_in(mesh, WEB, port)
        assert not await comes_in(mesh, GUEST, port)
        assert not await comes_in(mesh, "demo.local/ns/other/sa/x", port)
    assert "allowed identities: ns/clients/sa/web, ns/clients/sa/guest but not ns/clients/sa/guest" in (
        it.process.messages
    )


async def test_allowing_nobody_is_applied(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    server.policies = [policy("nobody", {})]
    environ = environment(mesh, tmp_path, server) | {"HBONE_POLICY": "apply"}
    async with serving(environ) as (_, port):
        assert not await comes_in(mesh, WEB, port)


async def test_ignored_ones_are_not_even_asked_for(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [NO_GUESTS]
    environ = environment(mesh, tmp_path, server) | {"HBONE_POLICY": "ignore"}
    async with serving(environ) as (it, port):
        assert await comes_in(mesh, GUEST, port)
    assert "does not enforce the mesh's AuthorizationPolicy" in " ".join(it.process.messages)
    assert server.asked == []


async def test_without_a_mesh_or_a_way_to_it_nothing_is_asked(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [NO_GUESTS]
    environ = environment(mesh, tmp_path, server)
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text((tmp_path / "kubeconfig").read_text())
    for missing in ({"XDS_ADDR": ""}, {"KUBECONFIG": "", "HOME": str(tmp_path)}):
        async with serving({**environ, **missing}):
            pass
    assert server.asked == []


async def test_the_cluster_that_mesh_names(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    """Its policies count, by the access that was found for mesh-env."""
    server.policies = [NO_GUESTS]
    server.mesh_env["demo"] = {"TRUST_DOMAIN": "demo.local"}
    environ = environment(mesh, tmp_path, server) | {"XDS_ADDR": "", "MESH": "kubernetes"}
    assert "demo/no-guests, which" in (await refused({**environ, "WORKLOAD_NAMESPACE": "demo"}))


# Policies that are not known.


async def test_what_is_to_be_applied_has_to_be_known(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    environ = environment(mesh, tmp_path, server) | {"HBONE_POLICY": "apply", "XDS_ADDR": ""}
    assert await refused({**environ, "KUBECONFIG": ""}) == (
        "krun: HBONE_POLICY=apply, but no API server is known: set MESH or KUBECONFIG"
    )
    server.may_list = {"demo"}
    line = await refused(environ, 77)
    assert line.startswith("krun: HBONE_POLICY=apply: the mesh's policies are not known: https://127.0.0.1:")
    assert line.endswith("verb list on authorizationpolicies of security.istio.io in namespace istio-system")


async def test_an_api_server_that_comes_late_is_waited_for(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [WEB_ONLY]
    server.answer = lambda _: (503, b"")
    environ = environment(mesh, tmp_path, server) | {"HBONE_POLICY": "apply"}
    async with krun(environ=environ) as it:
        await it.process.said(r"^HBONE_POLICY: .* answered 503; again in 0\.5 s$")
        server.answer = lambda _: None
        await it.process.said(
            "^policies of the mesh for demo/hello, all enforced: AuthorizationPolicy demo/web-only$"
        )
        await it.listening()


async def test_a_role_that_is_missing_is_a_warning(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.may_list = set()
    async with serving(environment(mesh, tmp_path, server)) as (it, _):
        pass
    (line,) = [one for one in it.process.messages if "not all policies" in one]
    assert line.startswith("HBONE_POLICY=check: not all policies of the mesh are known: https://127.0.0.1:")
    rule = "verb list on authorizationpolicies of security.istio.io in namespace demo"
    assert line.endswith(f"a Role has to allow us the {rule} (and 5 more)")
    (said,) = [one for one in it.process.messages if "HBONE_ALLOW is not set" in one]
    assert "does not enforce the mesh's AuthorizationPolicy" in said


async def test_what_may_be_read_counts_without_the_rest(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.may_list = {"demo"}
    server.policies = [NO_GUESTS]
    environ = environment(mesh, tmp_path, server) | {"HBONE_LOG_LEVEL": "error"}
    assert "demo/no-guests, which" in await refused(environ)


@pytest.mark.parametrize("versions", [set(), {"v1beta1"}])
async def test_a_cluster_without_istio_and_an_older_one(
    versions: set[str], mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.istio_versions = versions
    server.policies = [NO_GUESTS]
    if versions:
        assert "demo/no-guests, which" in await refused(environment(mesh, tmp_path, server))
        return
    async with krun(environ=environment(mesh, tmp_path, server)) as it:
        await it.process.said("^policies of the mesh for demo/hello, all enforced: none$")
        await it.listening()


async def test_an_api_server_that_is_away_does_not_end_the_start(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    environ = environment(mesh, tmp_path, server)
    text = (tmp_path / "kubeconfig").read_text().replace(server.url, f"https://127.0.0.1:{closed_port()}")
    (tmp_path / "kubeconfig").write_text(text)
    async with krun(environ=environ) as it:
        await it.process.said("^HBONE_POLICY=check: the mesh's policies are not known: .*connection refused")
        await it.process.said("^HBONE_ALLOW is not set")
        await it.listening()


async def test_a_kubeconfig_that_is_wrong(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    """It may be the app's: it ends the start only where policies are to be applied."""
    environ = environment(mesh, tmp_path, server)
    (tmp_path / "kubeconfig").write_text("[")
    async with krun(environ=environ) as it:
        await it.process.said(
            f"^HBONE_POLICY=check: the mesh's policies are not known: {tmp_path}/kubeconfig"
        )
        await it.listening()
    line = await refused({**environ, "HBONE_POLICY": "apply"}, 78)
    assert line.startswith(
        f"krun: HBONE_POLICY=apply: the mesh's policies are not known: {tmp_path}/kubeconfig"
    )


async def test_a_url_that_is_not_the_api_server_s(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    """It answers 404, as a cluster without Istio does."""
    server.policies = [NO_GUESTS]
    environ = environment(mesh, tmp_path, server) | {"HBONE_POLICY": "apply"}
    text = (tmp_path / "kubeconfig").read_text().replace(server.url, f"{server.url}/wrong")
    (tmp_path / "kubeconfig").write_text(text)
    line = await refused(environ)
    assert line.endswith("authorizationpolicies is not there: check the server's URL, and Istio's CRDs")


async def test_without_a_trust_domain_policies_mean_nothing(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [NO_GUESTS]
    environ = environment(mesh, tmp_path, server)
    folder = Path(environ["HBONE_CERTS"])
    mesh.authority.write(folder, mesh.authority.issue(dns_names=["hello.demo"]))
    for more in ({}, {"HBONE_ALLOW": f"spiffe://{WEB}"}):
        with pytest.raises(DeniedError, match=r"own certificate: .*no X509-SVID: set TRUST_DOMAIN"):
            await MeshPolicies(settings_of({**environ, **more}), access(server), "builtin").start()


# Later.


def settings_of(environ: Mapping[str, str]) -> Settings:
    return dataclasses.replace(from_env(environ), cluster_access={})


@asynccontextmanager
async def watching(
    settings: Settings, server: LocalApiServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MeshPolicies]:
    monkeypatch.setattr(mesh_policies, "LOOK_S", 0.02)
    policies = MeshPolicies(settings, access(server), "builtin")
    await policies.start()
    policies.watch()
    yield policies
    await policies.close()


async def looked_again(server: LocalApiServer) -> None:
    """Returns when the policies have been read as they are now."""
    before = len(server.asked)
    await server.seen(before + 13)  # six requests a look: the second of these looks is over


async def test_a_policy_that_comes_later_and_goes_again(
    mesh: Mesh,
    tmp_path: Path,
    server: LocalApiServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hbone.policy")
    settings = settings_of(environment(mesh, tmp_path, server))
    async with watching(settings, server, monkeypatch) as policies:
        assert list(policies.unenforced) == []
        server.policies = [NO_GUESTS]
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/no-guests"]
        server.answer = lambda _: (500, b"")
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/no-guests"]
        server.answer = lambda _: None
        server.may_list = {"istio-system"}
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/no-guests"]
        server.may_list = {"istio-system", "demo"}
        server.policies = []
        await looked_again(server)
        assert list(policies.unenforced) == []
    later, broken, gone = [one for one in caplog.messages if "all enforced: none" not in one]
    assert later == (
        "policies of the mesh for demo/hello: the builtin mTLS end does not enforce "
        "AuthorizationPolicy demo/no-guests. This krun keeps running. New instances will not start"
    )
    assert "cannot be read again" in broken and "500" in broken
    assert gone == "policies of the mesh for demo/hello: all are enforced again"


async def test_a_policy_that_changes_what_was_applied(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.policies = [WEB_ONLY]
    settings = settings_of(environment(mesh, tmp_path, server) | {"HBONE_POLICY": "apply"})
    async with watching(settings, server, monkeypatch) as policies:
        server.policies = [policy("web-only", of("ALLOW", GUEST))]
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/web-only"]


async def test_a_refusal_takes_nothing_back(
    mesh: Mesh,
    tmp_path: Path,
    server: LocalApiServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As many refusals as at the start, of another namespace: what was read there counts on."""
    caplog.set_level("INFO", "hbone.policy")
    server.may_list = {"demo"}
    async with watching(settings_of(environment(mesh, tmp_path, server)), server, monkeypatch) as policies:
        server.policies = [NO_GUESTS]
        await looked_again(server)
        server.may_list = {"istio-system"}
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/no-guests"]
    assert "in namespace demo" in caplog.messages[-1]


async def test_a_start_that_could_read_nothing_looks_again(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.may_list = set()
    async with watching(settings_of(environment(mesh, tmp_path, server)), server, monkeypatch) as policies:
        server.may_list, server.policies = {"demo", "istio-system"}, [NO_GUESTS]
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/no-guests"]


async def test_an_object_that_nobody_has_thought_of_does_not_end_the_watch(
    mesh: Mesh,
    tmp_path: Path,
    server: LocalApiServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> bool:
        raise KeyError("odd")

    settings = settings_of(environment(mesh, tmp_path, server))
    async with watching(settings, server, monkeypatch) as policies:
        with monkeypatch.context() as broken:
            broken.setattr(Policy, "applies", fails)
            server.policies = [NO_GUESTS]
            await looked_again(server)
        await looked_again(server)
        assert list(policies.unenforced) == ["AuthorizationPolicy demo/no-guests"]
    assert [one for one in caplog.messages if "failed" in one] == [
        "task watch policies failed: KeyError: 'odd'"
    ]


async def test_a_deny_is_for_the_trust_domains_that_an_allow_lets_in(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    far = "far.local/ns/clients/sa/web"
    no_clients = policy(
        "no-clients", {"action": "DENY", "rules": [{"from": [{"source": {"namespaces": ["x"]}}]}]}
    )
    server.policies = [policy("far-only", of("ALLOW", far)), no_clients]
    told = environment(mesh, tmp_path, server)
    applied = await MeshPolicies(
        settings_of({**told, "HBONE_POLICY": "apply"}), access(server), "builtin"
    ).start()
    assert applied.allow == (f"spiffe://{far}",)
    assert applied.deny == ("ns/x/sa/*", "spiffe://far.local/ns/x/sa/*")
    with pytest.raises(UnavailableError) as caught:
        await MeshPolicies(settings_of(told), access(server), "builtin").start()
    lists = f"HBONE_ALLOW=spiffe://{far} and HBONE_DENY=ns/x/sa/*,spiffe://far.local/ns/x/sa/*"
    assert f": set {lists}, or HBONE_POLICY=apply" in str(caught.value)
    pair = dict(part.split("=") for part in lists.split(" and "))
    enforced = await MeshPolicies(settings_of({**told, **pair}), access(server), "builtin").start()
    assert enforced.allow == applied.allow, "what is proposed is enough"


async def test_many_policies_are_read_in_pages(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    server.policies = [policy(f"p{number}", of("DENY", GUEST)) for number in range(7)]
    settings = settings_of(environment(mesh, tmp_path, server))
    with pytest.raises(UnavailableError) as caught:
        await MeshPolicies(settings, access(server), "envoy").start()
    assert "AuthorizationPolicy demo/p4 and 2 more, which the envoy mTLS end" in str(caught.value)


async def test_policies_of_a_megabyte(mesh: Mesh, tmp_path: Path, server: LocalApiServer) -> None:
    large = policy("large", of("DENY", GUEST))
    large["metadata"]["annotations"] = {"about": "x" * 1_200_000}
    server.policies = [large]
    with pytest.raises(UnavailableError, match="under AuthorizationPolicy demo/large, which"):
        await MeshPolicies(settings_of(environment(mesh, tmp_path, server)), access(server), "envoy").start()


async def test_a_proposal_that_would_fill_the_screen(
    mesh: Mesh, tmp_path: Path, server: LocalApiServer
) -> None:
    server.policies = [policy("many", of("DENY", *(f"{GUEST}{number}" for number in range(50))))]
    settings = settings_of(environment(mesh, tmp_path, server))
    with pytest.raises(UnavailableError) as caught:
        await MeshPolicies(settings, access(server), "envoy").start()
    assert str(caught.value).endswith("does not enforce: set HBONE_POLICY=apply, or set HBONE_POLICY=ignore")
