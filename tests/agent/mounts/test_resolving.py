"""References in variables: all resolved, or one line about the first that is not."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.config.mount_settings import MountSettings
from agent.config.settings import from_env
from agent.mounts import resolving
from agent.mounts.resolving import MAX_REQUESTS, Resolver
from agent.mounts.value_files import ValueFiles
from shared.credentials.certificates.authority import Authority
from shared.credentials.kubernetes.kubernetes_access import Bearer
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.errors import HboneError, TokenError
from shared.tasks import spawn
from tests.agent.mounts.test_cluster_objects import b64
from tests.support.api_server import LocalApiServer
from tests.support.gke_server import PROJECT, TOKEN, GkeServer, cluster
from tests.support.google_secrets import GoogleSecretsServer, error
from tests.support.metadata_server import closed_port
from tests.support.system_trust import system_trusts

IN_CLUSTER = f"projects/{PROJECT}/locations/us-central1/clusters/c/namespaces/demo"


class World:
    """Google's services, a cluster, and what resolves their references."""

    def __init__(self, google: GoogleSecretsServer, gke: GkeServer, api: LocalApiServer) -> None:
        self.google = google
        self.gke = gke
        self.api = api
        self.files = ValueFiles()
        self.bearer: Bearer = GivenToken(TOKEN)
        self.more: dict[str, str] = {}
        self.own: set[str] = set()
        """The container's variables; empty: all are."""

    @property
    def settings(self) -> MountSettings:
        return from_env({**self.google.settings(), "HBONE_GKE_URL": self.gke.url, **self.more}).mounts

    async def resolved(self, timeout_s: float = 5.0, /, **environ: str) -> dict[str, str]:
        resolver = Resolver(self.settings, self.bearer, self.files)
        return await resolver.resolve(environ, timeout_s, own=self.own or environ)

    async def failed(self, code: int, /, **environ: str) -> str:
        timeout_s = 0.4
        with pytest.raises(HboneError) as caught:
            await self.resolved(timeout_s, **environ)
        text = str(caught.value)
        assert caught.value.exit_code == code, text
        assert "hunter2" not in text and "\n" not in text
        return text


@asynccontextmanager
async def worlds(folder: Path) -> AsyncIterator[World]:
    authority = Authority.create("google.example")
    (folder / "trusted.pem").write_bytes(authority.root_pem)
    with system_trusts(folder / "trusted.pem"):
        async with (
            GoogleSecretsServer(authority) as google,
            GkeServer(authority) as gke,
            LocalApiServer() as api,
        ):
            api.users[TOKEN] = "krun"
            endpoint = api.url.removeprefix("https://")
            gke.clusters = [cluster("c", endpoint=endpoint, ca_pem=api.ca_pem)]
            google.secrets["proj", "db", "latest"] = b"pass word\n"
            google.secrets["proj", "db", "3"] = b"third"
            google.berglas("bucket", "key.json", b"{}")
            await api.put("secrets", "db-credentials", data={"tls.key": b64(b"k"), "user": b64(b"me")})
            await api.put("configmaps", "app-config", data={"mode": "fast"}, binaryData={"b": b64(b"\xff")})
            yield World(google, gke, api)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with worlds(tmp_path) as world:
        yield world


async def test_each_kind(world: World) -> None:
    found = await world.resolved(
        A="sm://proj/db",
        B="sm://proj/db#3",
        C="berglas://bucket/key.json",
        D=f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db-credentials/keys/user",
        E=f"$ConfigMapKeyRef:{IN_CLUSTER}/configmaps/app-config/keys/mode",
        F=f"$ConfigMapKeyRef:{IN_CLUSTER}/configmaps/app-config/keys/b",
        PLAIN="http://sm://",
    )
    assert found == {"A": "pass word\n", "B": "third", "C": "{}", "D": "me", "E": "fast", "F": "\udcff"}


async def test_what_several_refer_to_is_asked_for_once(world: World) -> None:
    secret = f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db-credentials/keys"
    await world.resolved(A="sm://proj/db", B="sm://proj/db", C=f"{secret}/user", D=f"{secret}/tls.key")
    assert len(world.google.requests) == len(world.api.requests) == len(world.gke.requests) == 1


async def test_values_in_files(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    found = await world.resolved(
        A="berglas://bucket/key.json?destination=tempfile",
        B=f"sm://proj/db?destination={tmp_path}/new/password#3",
        C=f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db-credentials/keys/tls.key?tempFile=true",
    )
    assert found["B"] == f"{tmp_path}/new/password"
    assert Path(found["A"]).suffix == ".json" and Path(found["C"]).suffix == ".key"
    files = [Path(found[name]) for name in "ABC"]
    assert [file.read_bytes() for file in files] == [b"{}", b"third", b"k"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    world.files.close()
    assert [file.exists() for file in files] == [False, True, False], "temporary ones go with krun"


async def test_many_are_asked_for_at_once_within_a_bound(world: World) -> None:
    environ = {f"V{number}": f"sm://proj/s{number}" for number in range(20)}
    world.google.secrets.update({("proj", f"s{number}", "latest"): b"x" for number in range(20)})
    world.google.gate.clear()
    resolving = spawn(world.resolved(5.0, **environ), name="resolving")
    await world.google.seen(MAX_REQUESTS)
    assert len(world.google.requests) == MAX_REQUESTS
    world.google.gate.set()
    assert await resolving == dict.fromkeys(environ, "x")


# What cannot be resolved.


async def test_the_first_is_named_and_the_others_with_it(world: World) -> None:
    missing = {f"X{number}": "sm://proj/nobody" for number in range(7)}
    text = await world.failed(69, **{"A": "sm://proj/db", "DB": "sm://proj/hunter2", **missing})
    assert text == (
        "DB is not resolved: Secret Manager answered 404 (NOT_FOUND); there is no such secret, or version; "
        "not resolved either: X0, X1, X2, X3, X4 and 2 more"
    )


async def test_no_permission(world: World) -> None:
    world.google.answer = lambda _: error(403, "PERMISSION_DENIED")
    text = await world.failed(77, DB="sm://proj/db")
    assert text.startswith(
        "DB is not resolved: Secret Manager answered 403 (PERMISSION_DENIED); the account needs"
    )
    text = await world.failed(77, DB=f"$SecretKeyRef:/{IN_CLUSTER}/secrets/others/keys/a")
    assert "a Role has to allow us the verb get on secrets in namespace demo" in text
    world.gke.refusal = (403, "not you")
    text = await world.failed(77, DB=f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db-credentials/keys/a")
    assert "the account needs the role container.clusterViewer" in text


async def test_a_token_that_is_not_accepted(world: World) -> None:
    world.google.tokens.clear()
    text = await world.failed(77, DB="sm://proj/db")
    assert text.endswith(
        "answered 401 (UNAUTHENTICATED); it does not accept the access token of the metadata server"
    )


async def test_no_token(world: World) -> None:
    class Nobody(GivenToken):
        async def token(self) -> str:
            raise TokenError("no metadata server: gone")

    world.bearer = Nobody("")
    assert await world.failed(77, DB="sm://proj/db") == "DB is not resolved: no metadata server: gone"


async def test_a_service_that_cannot_be_reached(world: World) -> None:
    world.more = {"HBONE_SECRET_MANAGER_URL": f"https://127.0.0.1:{closed_port()}"}
    assert (await world.failed(69, DB="sm://proj/db")).startswith(
        "DB is not resolved: cannot connect to 127.0"
    )


async def test_a_service_that_does_not_answer(world: World) -> None:
    world.google.gate.clear()
    assert await world.failed(69, DB="sm://proj/db") == "DB is not resolved: no answer within 0.4 s"


async def test_a_refusal_does_not_wait_for_a_service_that_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "MOMENT_S", 0.05)
    world.api.gate.clear()
    with pytest.raises(HboneError, match=r"^DB is not resolved: Secret Manager answered 404 [^;]*; [^;]*$"):
        await world.resolved(
            3600.0,
            A=f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db-credentials/keys/user",
            DB="sm://proj/nobody",
        )


async def test_a_service_that_is_busy_is_asked_again(world: World) -> None:
    answers = [error(503, "UNAVAILABLE")]
    world.google.answer = lambda _: answers.pop() if answers else None
    assert await world.resolved(DB="sm://proj/db#3") == {"DB": "third"}


async def test_a_token_that_is_rejected_is_renewed(world: World) -> None:
    class Renewed(GivenToken):
        tokens: tuple[str, ...] = ("ya29.expired", TOKEN)

        async def token(self) -> str:
            return self.tokens[0]

        def invalidate(self, rejected: str | None = None) -> None:
            assert rejected == self.tokens[0]
            self.tokens = self.tokens[1:]

    world.bearer = Renewed("")
    assert await world.resolved(DB="sm://proj/db#3") == {"DB": "third"}


async def test_what_is_malformed(world: World, tmp_path: Path) -> None:
    assert await world.failed(78, A="sm://proj/db", B="sm://hunter2") == (
        "environment: B: malformed reference: it has to be sm://PROJECT/NAME"
    )
    assert not world.google.requests, "nothing has been asked"
    same = f"destination={tmp_path}/x"
    text = await world.failed(78, A=f"sm://proj/db?{same}", B=f"sm://proj/db?{same}#3")
    assert text == "environment: A: another variable's reference has the same destination"
    world.google.secrets["proj", "nul", "latest"] = b"hunter2\0"
    text = await world.failed(78, A="sm://proj/nul")
    assert text.startswith("A is not resolved: Secret Manager: it has a NUL byte: add ?destination=tempfile")
    world.google.secrets["proj", "long", "latest"] = b"hunter2" * 20_000
    text = await world.failed(78, A="sm://proj/long")
    assert text.startswith("A is not resolved: Secret Manager: it is too long for a variable: add")


async def test_a_key_or_an_object_that_is_missing(world: World) -> None:
    text = await world.failed(69, A=f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db-credentials/keys/nobody")
    assert text == "A is not resolved: the Secret has no such key"
    text = await world.failed(69, A=f"$ConfigMapKeyRef:/{IN_CLUSTER}/configmaps/absent/keys/a")
    assert text.startswith("A is not resolved: there is no configmap/absent of namespace demo on https://")


async def test_an_object_of_the_cluster_names_no_file(world: World, tmp_path: Path) -> None:
    """krun may be root; whoever edits a ConfigMap is not."""
    world.own = {"B"}
    text = await world.failed(78, A=f"sm://proj/db?destination={tmp_path}/app", B="sm://proj/db")
    assert text.startswith("HBONE_ENV_FROM: A: only the container's own variables may have destination=/PATH")
    assert not (tmp_path / "app").exists()


async def test_a_destination_that_cannot_be_written(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = await world.failed(69, A=f"sm://proj/db?destination={tmp_path}/file/a")
    assert text == "A is not resolved: cannot write its destination: File exists"
