"""What krun gets for its workload, in which order; `tests/path/test_own_certificates.py` has all of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agent.config.settings import from_env
from agent.identity.workload_identity import WorkloadIdentity
from shared.credentials.certificates.authority import Authority
from shared.errors import SigningError, TokenError
from shared.net.tls import certificate_check, certificate_folder
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.api_server import NAMESPACE, SERVICE_ACCOUNT, LocalApiServer, kubeconfig
from tests.support.istiod import Istiod
from tests.support.tcp_peer import PATIENCE_S

TRUST_DOMAIN = "demo.local"
HELLO = SpiffeId.of_workload(TRUST_DOMAIN, NAMESPACE, SERVICE_ACCOUNT)


class Story:
    """An API server, an istiod that believes its tokens, and what krun is told of them."""

    def __init__(self, folder: Path, server: LocalApiServer) -> None:
        self.folder = folder
        self.server = server
        self.mesh = Authority.create(TRUST_DOMAIN)
        self.istiod = Istiod(self.mesh, HELLO, review=lambda token: self.server.reviewed(token, TRUST_DOMAIN))

    def identity(self, **environ: str) -> WorkloadIdentity:
        (self.folder / "kubeconfig").write_text(kubeconfig(self.server))
        told = {
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "HBONE_K8S_TOKENS": f"istio-ca={self.folder / 'istio-token'}",
            "HBONE_CA": "istio",
            "CA_ADDR": str(self.istiod.address),
            "CAROOT_ISTIOD": self.mesh.root_pem.decode(),
            "HBONE_CERTS": str(self.folder / "certs"),
            "HBONE_CA_TIMEOUT": "1",
            "TRUST_DOMAIN": TRUST_DOMAIN,
            "WORKLOAD_SERVICE_ACCOUNT": SERVICE_ACCOUNT,
        }
        return WorkloadIdentity(from_env({**told, **environ}))

    @property
    def certificate_of(self) -> SpiffeId | None:
        found = certificate_folder.find(self.folder / "certs")
        return certificate_check.read(found, datetime.now(UTC)).identity


@pytest.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    async with LocalApiServer() as server:
        it = Story(tmp_path, server)
        with it.istiod.serving():
            yield it


@asynccontextmanager
async def started(identity: WorkloadIdentity) -> AsyncIterator[None]:
    try:
        await identity.start()
        yield
    finally:
        await identity.close()


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not so():  # noqa: ASYNC110  # another thread's doing, or another process's
            await asyncio.sleep(0.01)


async def test_by_default_there_is_nothing_to_do() -> None:
    async with started(WorkloadIdentity(from_env({}))):
        pass


async def test_a_namespace_that_is_told_counts(story: Story) -> None:
    story.server.may_create.add(("krun", "other"))
    story.server.service_accounts.add(("other", SERVICE_ACCOUNT))
    async with started(story.identity(WORKLOAD_NAMESPACE="other")):
        assert story.certificate_of == SpiffeId.of_workload(TRUST_DOMAIN, "other", SERVICE_ACCOUNT)


async def test_a_token_that_istiod_does_not_take(story: Story) -> None:
    (story.folder / "wrong").write_text("nobody-has-signed-it")
    wrong = str(story.folder / "wrong")
    with pytest.raises(SigningError, match=r"UNAUTHENTICATED: .*is the token for the audience istio-ca"):
        async with started(story.identity(HBONE_CA_TOKEN_FILE=wrong)):
            pass


async def test_without_tokens_nobody_asks_for_a_certificate(story: Story) -> None:
    story.server.may_create.clear()
    with pytest.raises(TokenError, match="a Role has to allow us"):
        async with started(story.identity()):
            pass
    assert story.istiod.calls == []


async def test_who_forgot_the_token_is_told_what_to_set(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    nowhere = str(story.folder / "missing")
    with pytest.raises(SigningError, match=f"cannot read token file {nowhere}: No such file"):
        async with started(story.identity(HBONE_K8S_TOKENS="", HBONE_CA_TOKEN_FILE=nowhere)):
            pass
    assert f"no token for Istio's CA in {nowhere} yet; HBONE_K8S_TOKENS=istio-ca: krun asks" in caplog.text


async def test_a_start_that_is_given_up_leaves_nothing_behind(story: Story) -> None:
    story.istiod.gate.clear()
    identity = story.identity(HBONE_CA_TIMEOUT="60")
    starting = spawn(identity.start(), name="start")
    await until(lambda: bool(story.istiod.calls))
    starting.cancel()
    await asyncio.wait({starting})
    await identity.close()
    assert not (story.folder / "certs").exists()
    assert (story.folder / "istio-token").exists()
