"""Tokens in files: written before the app starts, renewed like the kubelet does, never seen in part.

Time is turned by the tests: `Turned.to` moves the clock, and returns when all that was due by then is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.config.kubernetes_settings import KubernetesSettings, TokenFile
from agent.identity.token_files import Clock, TokenFiles, make_token_files
from shared.credentials.tokens.minting import Minted
from shared.errors import TokenDeniedError, TokenError, UnavailableError
from tests.support.api_server import NAMESPACE, SERVICE_ACCOUNT, LocalApiServer, api_server, kubeconfig
from tests.support.metadata_server import PATIENCE_S
from tests.support.turned_clock import TurnedClock

START_S = 1_800_000_000.0
HOUR_S = 3600.0


class Turned(TurnedClock):
    """The same from START_S on."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__(START_S)
        self.clock = Clock(self.now, self.wait, lambda: chance)

    resting = TurnedClock.settle

    async def to(self, seconds: float) -> None:
        """Moves on to `seconds` after the start, from one sleeper's end to the next one's."""
        await self.turn(START_S + seconds - self.now_s)


@dataclass
class Mint:
    """Tokens that say which one they are."""

    turned: Turned
    life_s: float = HOUR_S
    failure: Callable[[], TokenError] | None = None
    audiences: list[str] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    identity: str = "service account demo/hello"

    async def mint(self, audience: str) -> Minted:
        self.audiences.append(audience)
        self.at_s.append(self.turned.now_s - START_S)
        if self.failure is not None:
            raise self.failure()
        return Minted(
            f"token-{len(self.audiences)}-for-{audience or 'the server'}", self.turned.now_s + self.life_s
        )


@pytest.fixture
async def turned() -> Turned:
    return Turned()


def version(file: Path) -> tuple[int, int]:
    """Another one when the file was written or replaced."""
    return file.stat().st_ino, file.stat().st_mtime_ns


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@asynccontextmanager
async def kept(
    mint: Mint, *files: TokenFile, owner: tuple[int, int] | None = None, authority: bytes = b"the CA"
) -> AsyncIterator[TokenFiles]:
    it = TokenFiles(
        files,
        mint,
        namespace="demo",
        authority=lambda: authority,
        owner=owner,
        clock=mint.turned.clock,
    )
    try:
        yield it
    finally:
        it.close()


@asynccontextmanager
async def started(mint: Mint, *files: TokenFile, owner: tuple[int, int] | None = None) -> AsyncIterator[None]:
    """Such files once the first tokens are there."""
    async with kept(mint, *files, owner=owner) as it:
        await it.start(30)
        yield


async def test_tokens_that_have_no_life_left_are_not_asked_for_all_the_time(
    turned: Turned, tmp_path: Path
) -> None:
    mint = Mint(turned, life_s=0.001)
    async with started(mint, TokenFile("a", tmp_path / "a")):
        await turned.to(35)
    assert mint.at_s == [0, 10, 20, 30]


# The first ones.


async def test_the_first_token_is_there_when_start_returns(turned: Turned, tmp_path: Path) -> None:
    file = tmp_path / "secrets" / "tokens" / "istio-token"
    async with started(Mint(turned), TokenFile("istio-ca", file)):
        assert file.read_text() == "token-1-for-istio-ca"
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.stat().st_uid == os.getuid()


async def test_a_folder_as_a_pod_has_it(turned: Turned, tmp_path: Path) -> None:
    async with started(Mint(turned), TokenFile("", tmp_path / "sa", is_folder=True)):
        files = {name: tmp_path / "sa" / name for name in names_in(tmp_path / "sa")}
        assert {name: path.read_text() for name, path in files.items()} == {
            "token": "token-1-for-the server",
            "ca.crt": "the CA",
            "namespace": "demo",
        }
        assert {name: path.stat().st_mode & 0o777 for name, path in files.items()} == {
            "token": 0o600,
            "ca.crt": 0o644,
            "namespace": 0o644,
        }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
async def test_files_belong_to_the_apps_user(turned: Turned, tmp_path: Path) -> None:
    file = TokenFile("", tmp_path, is_folder=True)
    async with started(Mint(turned), file, owner=(1234, 2345)):
        for name in ("token", "ca.crt", "namespace"):
            about = (tmp_path / name).stat()
            assert (about.st_uid, about.st_gid) == (1234, 2345)
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


async def test_what_may_pass_is_tried_again_until_the_deadline(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned, failure=lambda: TokenError("no token: cannot connect"))
    async with kept(mint, TokenFile("a", tmp_path / "a")) as it:
        starting = asyncio.ensure_future(it.start(30))  # noqa: TID251  # the test's own, awaited below
        await turned.to(2)
        assert mint.at_s == [0, 0.5, 1.5]
        mint.failure = None
        await turned.to(4)
        await starting
        assert (tmp_path / "a").read_text() == "token-4-for-a"


async def test_the_deadline_ends_it_with_the_last_reason(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned, failure=lambda: TokenError("no token: cannot connect"))
    async with kept(mint, TokenFile("a", tmp_path / "a")) as it:
        starting = asyncio.ensure_future(it.start(3))  # noqa: TID251  # the test's own, awaited below
        await turned.to(1)
        turned.now_s = START_S + 1.5
        turned.wake()
        with pytest.raises(TokenError, match="cannot connect"):
            await starting
        assert mint.at_s == [0, 0.5, 1.5], "the next pause, of 2 s, would be too long"


async def test_a_server_that_never_answers(turned: Turned, tmp_path: Path) -> None:
    class Silent(Mint):
        async def mint(self, audience: str) -> Minted:
            await asyncio.Event().wait()
            raise AssertionError

    async with kept(Silent(turned), TokenFile("a", tmp_path / "a")) as it:
        with pytest.raises(TokenError, match=r"no token of the service account demo/hello within 0\.05 s"):
            await it.start(0.05)


async def test_a_refusal_is_told_at_once(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned, failure=lambda: TokenDeniedError("no token: answered 403"))
    async with kept(mint, TokenFile("a", tmp_path / "a"), TokenFile("b", tmp_path / "b")) as it:
        with pytest.raises(TokenError, match="403"):
            await it.start(30)
    assert mint.at_s == [0, 0]
    assert names_in(tmp_path) == []


async def test_a_file_that_cannot_be_written(turned: Turned, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with kept(Mint(turned), TokenFile("a", tmp_path / "file" / "below")) as it:
        with pytest.raises(
            UnavailableError, match=r"cannot write .*/file/below: (File exists|Not a directory)"
        ):
            await it.start(30)


# Renewal.


async def test_renewed_at_80_percent(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned)
    async with started(mint, TokenFile("a", tmp_path / "a")):
        await turned.to(0.8 * HOUR_S - 1)
        assert mint.at_s == [0]
        await turned.to(0.8 * HOUR_S + 1)
        assert mint.at_s == [0, 0.8 * HOUR_S]
        assert (tmp_path / "a").read_text() == "token-2-for-a"
        await turned.to(1.6 * HOUR_S + 1)
        assert mint.at_s == [0, 0.8 * HOUR_S, 1.6 * HOUR_S]


async def test_instances_that_started_together_do_not_ask_together(tmp_path: Path) -> None:
    at_s = []
    for chance in (0.0, 0.5, 0.999):
        mint = Mint(turned := Turned(chance))
        async with started(mint, TokenFile("a", tmp_path / "a")):
            await turned.to(HOUR_S)
        at_s.append(mint.at_s[1] / HOUR_S)
    assert at_s == pytest.approx([0.8, 0.78, 0.76], abs=1e-3)


async def test_renewed_once_a_day_whatever_its_life(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned, life_s=365 * 24 * HOUR_S)
    async with started(mint, TokenFile("a", tmp_path / "a")):
        await turned.to(24 * HOUR_S + 1)
    assert mint.at_s == [0, 24 * HOUR_S]


async def test_each_file_has_its_own_time(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned)
    async with started(mint, TokenFile("a", tmp_path / "a"), TokenFile("b", tmp_path / "b")):
        assert mint.audiences == ["a", "b"]
        await turned.to(HOUR_S)
        assert mint.audiences == ["a", "b", "a", "b"]


async def test_a_clock_that_jumped_while_the_container_slept(turned: Turned, tmp_path: Path) -> None:
    mint = Mint(turned)
    async with started(mint, TokenFile("a", tmp_path / "a")):
        await turned.resting()
        turned.now_s += 5 * HOUR_S  # and the loop's timer has noticed nothing of it
        assert turned.wake() - START_S <= 60, "a look each minute"
        await turned.resting()
    assert mint.at_s == [0, 5 * HOUR_S]


async def test_the_old_file_stays_while_it_fails(
    turned: Turned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mint = Mint(turned)
    async with started(mint, TokenFile("a", tmp_path / "a")):
        before = version(tmp_path / "a")
        mint.failure = lambda: TokenError("no token: answered 503")
        await turned.to(0.8 * HOUR_S + 200)
        assert version(tmp_path / "a") == before
        pauses_s = [b - a for a, b in zip(mint.at_s[1:], mint.at_s[2:], strict=False)]
        assert pauses_s[:8] == [0.5, 1, 2, 4, 8, 16, 30, 30], "doubled, and half of it at least"
        assert "not renewed, the one in it ends in 720 s: no token: answered 503" in caplog.text
        mint.failure = None
        await turned.to(0.8 * HOUR_S + 300)
        assert (tmp_path / "a").read_text() == f"token-{len(mint.at_s)}-for-a"
        mint.at_s.clear()
        mint.failure = lambda: TokenError("no token: answered 503")
        await turned.to(1.7 * HOUR_S)
        assert mint.at_s[1] - mint.at_s[0] == 0.5, "another time begins with the shortest pause"


async def test_a_refusal_later_on_is_no_end_either(
    turned: Turned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mint = Mint(turned)
    async with started(mint, TokenFile("a", tmp_path / "a")):
        mint.failure = lambda: TokenDeniedError("no token: answered 403")
        await turned.to(HOUR_S + 60)
        assert "the one in it has ended: no token: answered 403" in caplog.text
        mint.failure = None
        await turned.to(HOUR_S + 200)
        assert "token-1-" not in (tmp_path / "a").read_text()


async def test_a_folder_that_vanishes_is_made_again(turned: Turned, tmp_path: Path) -> None:
    async with started(Mint(turned), TokenFile("a", tmp_path / "x" / "a")):
        (tmp_path / "x" / "a").unlink()
        (tmp_path / "x").rmdir()
        await turned.to(HOUR_S)
        assert (tmp_path / "x" / "a").read_text() == "token-2-for-a"


async def test_what_has_not_changed_is_not_written(turned: Turned, tmp_path: Path) -> None:
    async with started(Mint(turned), TokenFile("", tmp_path, is_folder=True)):
        before = version(tmp_path / "ca.crt"), version(tmp_path / "token")
        await turned.to(HOUR_S)
        after = version(tmp_path / "ca.crt"), version(tmp_path / "token")
    assert before[0] == after[0]
    assert before[1] != after[1]


async def test_a_reader_never_sees_a_part_in_a_hundred_rotations(turned: Turned, tmp_path: Path) -> None:
    file = tmp_path / "a"
    seen: set[str] = set()
    async with started(Mint(turned), TokenFile("a", file)):
        held = file.open()  # of a reader that is slow
        for turn in range(1, 101):
            await turned.to(turn * 0.8 * HOUR_S + 1)
            seen.add(file.read_text())
        assert held.read() == "token-1-for-a"
        held.close()
    assert seen == {f"token-{n}-for-a" for n in range(2, 102)}
    assert names_in(tmp_path) == ["a"]


async def test_no_token_is_in_any_line(
    turned: Turned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with started(Mint(turned), TokenFile("a", tmp_path / "a")):
        await turned.to(HOUR_S)
    assert "token for a in" in caplog.text and "token-1" not in caplog.text and "token-2" not in caplog.text


# With an API server.


async def test_what_settings_come_to(tmp_path: Path) -> None:
    async with api_server() as server:
        (tmp_path / "config").write_text(kubeconfig(server, namespace="another"))
        it = make_token_files(
            KubernetesSettings(
                (
                    TokenFile("istio-ca", tmp_path / "istio-token"),
                    TokenFile("", tmp_path / "sa", is_folder=True),
                ),
                access={"KUBECONFIG": str(tmp_path / "config")},
                namespace=NAMESPACE,
                service_account=SERVICE_ACCOUNT,
            )
        )
        try:
            await it.start(PATIENCE_S)
        finally:
            it.close()
        await server.verify((tmp_path / "istio-token").read_text(), "istio-ca")
        assert (tmp_path / "sa" / "ca.crt").read_bytes() == server.ca_pem
        assert (tmp_path / "sa" / "namespace").read_text() == NAMESPACE


def test_a_namespace_of_the_kubeconfig_that_can_be_none(tmp_path: Path) -> None:
    server = LocalApiServer(url="https://127.0.0.1:1")
    (tmp_path / "config").write_text(kubeconfig(server, namespace="../x"))
    settings = KubernetesSettings(
        (TokenFile("a", tmp_path / "a"),), access={"KUBECONFIG": str(tmp_path / "config")}
    )
    with pytest.raises(UnavailableError, match="no name of a namespace"):
        make_token_files(settings)
