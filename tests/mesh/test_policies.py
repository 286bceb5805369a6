"""The mesh's policies, as the real API server and Istio's own CRDs have them, to krun's own mTLS ends."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shared.errors import EXIT_UNAVAILABLE
from tests.mesh.objects import Object, manifest
from tests.mesh.places import Process, run_in, until
from tests.mesh.workloads import Workloads, ask

PATIENCE_S = 30.0

LOOK_S = 80.0
"""krun looks every 30 to 60 s."""

LOOKS = {"WORKLOAD_NAME": "hello"}


def roles() -> list[Object]:
    """What lets krun read the policies of the workload's namespace and of the mesh's."""
    group = "rbac.authorization.k8s.io"
    made: list[Object] = []
    for namespace in ("demo", "istio-system"):
        about = {"name": "krun-policies", "namespace": namespace}
        rule = {
            "apiGroups": ["security.istio.io"],
            "resources": ["authorizationpolicies", "peerauthentications", "requestauthentications"],
            "verbs": ["list"],
        }
        made.append({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": about, "rules": [rule]})
        ref = {"apiGroup": group, "kind": "Role", "name": "krun-policies"}
        user = {"apiGroup": group, "kind": "User", "name": "krun"}
        binding = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": about}
        made.append({**binding, "roleRef": ref, "subjects": [user]})
    return made


@pytest.fixture
def applied(mesh: Workloads) -> Iterator[Workloads]:
    """The policies of `hello` and `deny`, which krun may read."""
    mesh.plane.objects.apply([*roles(), *manifest("hello"), *manifest("deny")])
    yield mesh
    mesh.plane.objects.apply(manifest("deny"))
    mesh.plane.objects.delete([*manifest("deny"), *roles()])


@pytest.fixture
def started() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


def test_a_deny_that_nobody_enforces_ends_the_start(applied: Workloads) -> None:
    krun = applied.krun("builtin", LOOKS)
    assert krun.started.wait(PATIENCE_S) == EXIT_UNAVAILABLE
    assert krun.said.strip().splitlines()[-1] == (
        "krun: demo/hello is under AuthorizationPolicy demo/no-guests, which the builtin mTLS end does not "
        "enforce: set HBONE_DENY=ns/clients/sa/guest, or HBONE_POLICY=apply, or set HBONE_POLICY=ignore"
    )


@pytest.mark.parametrize("end", ["builtin", "envoy"])
def test_it_is_applied_as_istio_means_it(applied: Workloads, started: list[Process], end: str) -> None:
    krun = applied.krun(end, {**LOOKS, "HBONE_POLICY": "apply"})
    started.append(krun)
    applied.krun_ready(krun)
    assert ask("web").status == 200
    assert ask("guest").status in (403, 503)


@pytest.mark.timeout(200)
def test_a_policy_that_comes_later_is_told(applied: Workloads, started: list[Process]) -> None:
    applied.plane.objects.delete(manifest("deny"))
    krun = applied.krun("builtin", LOOKS)
    started.append(krun)
    applied.krun_ready(krun)
    assert "policies of the mesh for demo/hello, all enforced: PeerAuthentication demo/hello" in krun.said
    applied.plane.objects.apply(manifest("deny"))
    told = "mTLS end does not enforce AuthorizationPolicy demo/no-guests. This krun keeps running"
    until(lambda: True if told in krun.said else None, LOOK_S, "a warning")
    assert ask("guest").status == 200
    assert (
        "\nhbone_policies_unenforced 1.0\n"
        in run_in("app", "curl", "-s", "http://127.0.0.1:15020/metrics").stdout
    )
    status = run_in("app", "curl", "-s", "http://127.0.0.1:15019/status").stdout
    assert json.loads(status)["mtls_end"]["unenforced_policies"] == ["AuthorizationPolicy demo/no-guests"]


def test_without_the_role_krun_says_which(mesh: Workloads, started: list[Process]) -> None:
    krun = mesh.krun("builtin", LOOKS)
    started.append(krun)
    mesh.krun_ready(krun)
    assert (
        "a Role has to allow us the verb list on authorizationpolicies of security.istio.io in namespace demo"
        in krun.said
    )
