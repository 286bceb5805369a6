"""Kubernetes tokens in the files where workloads look for them, kept current as the kubelet keeps them.

A file is written before the app starts. It is renewed when 80 % of its token's life are over, or a day, each
less a random part, so that many instances that started together do not ask together. When a renewal fails the
old file stays, and the next attempt follows after a pause that doubles. Files are replaced whole, so a reader
never sees a part. If the folder is to look like a pod's, `ca.crt` and `namespace` come before the token.

One task serves all files. It goes by the wall clock, as tokens do, and checks it every minute at least: when
Cloud Run has put a container to sleep, the event loop knows nothing of the time that passed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.config.kubernetes_settings import KubernetesSettings, TokenFile
from shared import regular_files
from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE, write_atomically
from shared.backoff import doubled_s, half_or_more
from shared.credentials.kubernetes.kubernetes_names import AUTHORITY_FILE, NAMESPACE_FILE
from shared.credentials.tokens.minting import Minted, Minter
from shared.errors import HboneError, TokenDeniedError, TokenError, UnavailableError
from shared.tasks import spawn

if TYPE_CHECKING:
    from shared.credentials.kubernetes.kubernetes_access import Access

log = logging.getLogger("hbone.tokens")

RENEW_AT = 0.8
"""The part of a token's life after which the kubelet asks for the next one (pkg/kubelet/token)."""

MAX_AGE_S = 24 * 3600.0
"""The kubelet renews after a day in any case: who has stolen a token has it no longer."""

JITTER = 0.05
"""By how much of the wait a renewal may come sooner, by chance: 2.4 min of an hour's token."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""After a failure; a part of it by chance. Of an hour's token 12 minutes are left, a dozen attempts."""

MIN_WAIT_S = 10.0
"""Between two renewals: tokens live ten minutes at least, so only a clock that is wrong asks for less."""

LOOK_S = 60.0
"""Between two looks at the wall clock."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time as `TokenFiles` sees it; tests have another."""

    now: Callable[[], float] = time.time
    """Seconds since 1970."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Returns some time later, after so many seconds at most."""

    chance: Callable[[], float] = random.random
    """From 0 up to 1."""


@dataclass(slots=True)
class _Kept:
    """A file, and when it is due."""

    file: TokenFile
    due_s: float = 0.0
    expires_at_s: float = 0.0
    failures: int = 0


class TokenFiles:
    """Keeps `files` current from `start` on, until `close`."""

    def __init__(
        self,
        files: Sequence[TokenFile],
        minter: Minter,
        *,
        namespace: str,
        authority: Callable[[], bytes],
        owner: tuple[int, int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`authority` gives the PEM for `ca.crt`, and may raise UnavailableError. `owner` is a user and a
        group id, None: ours."""
        self.namespace = namespace
        """The workload's, as told or as our access to the cluster has it."""
        self._kept = [_Kept(file) for file in files]
        self._minter = minter
        self._authority = authority
        self._owner = owner
        self._clock = Clock() if clock is None else clock
        self._task: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Writes all files, and looks after them from then on.

        What fails is tried again within `timeout_s` seconds, unless the API server has said no.

        Raises:
            TokenError: there was no token in time.
            UnavailableError: a file cannot be written, or given to its owner.
        """
        deadline_s = self._clock.now() + timeout_s
        firsts = [
            spawn(self._first(kept, deadline_s), name=f"first token in {kept.file.path}")
            for kept in self._kept
        ]
        try:
            async with asyncio.timeout(timeout_s):  # a request that hangs is none that can be tried again
                await asyncio.gather(*firsts)
        except TimeoutError as error:
            text = f"no token of the {self._minter.identity} within {timeout_s:g} s"
            raise TokenError(text, "unreachable") from error
        finally:
            for first in firsts:
                first.cancel()
        self._task = spawn(self._keep(), name="token files")

    def close(self) -> None:
        """Leaves the files as they are."""
        if self._task is not None:
            self._task.cancel()

    # The first ones.

    async def _first(self, kept: _Kept, deadline_s: float) -> None:
        while True:
            try:
                await self._renew(kept)
                return
            except TokenDeniedError:
                raise
            except TokenError as error:
                left_s = deadline_s - self._clock.now()
                pause_s = self._pause_s(kept)
                if pause_s >= left_s:
                    raise
                log.warning("first token in %s: %s; next attempt in %.1f s", kept.file.path, error, pause_s)
                await self._clock.sleep(pause_s)

    # All others.

    async def _keep(self) -> None:
        while True:
            kept = min(self._kept, key=lambda kept: kept.due_s)
            wait_s = kept.due_s - self._clock.now()
            if wait_s > 0:
                await self._clock.sleep(min(wait_s, LOOK_S))
                continue
            try:
                await self._renew(kept)
            except HboneError as error:
                pause_s = self._pause_s(kept)
                kept.due_s = self._clock.now() + pause_s
                left_s = kept.expires_at_s - self._clock.now()
                state = f"the one in it ends in {left_s:.0f} s" if left_s > 0 else "the one in it has ended"
                log.warning(
                    "token in %s not renewed, %s: %s; next attempt in %.0f s",
                    kept.file.path,
                    state,
                    error,
                    pause_s,
                )

    def _pause_s(self, kept: _Kept) -> float:
        longest_s = doubled_s(FIRST_PAUSE_S, MAX_PAUSE_S, kept.failures)
        kept.failures += 1
        return half_or_more(longest_s, self._clock.chance())

    async def _renew(self, kept: _Kept) -> None:
        minted = await self._minter.mint(kept.file.audience)
        try:
            self._write(kept.file, minted)
        except OSError as error:
            raise UnavailableError(f"cannot write {kept.file.path}: {error.strerror or error}") from error
        now_s = self._clock.now()
        wait_s = min((minted.expires_at_s - now_s) * RENEW_AT, MAX_AGE_S)
        wait_s *= 1 - JITTER * self._clock.chance()
        # A token with no life left to speak of, by our clock, is no reason to ask all the time.
        kept.due_s = now_s + max(wait_s, MIN_WAIT_S)
        kept.expires_at_s = minted.expires_at_s
        kept.failures = 0
        log.info(
            "token for %s in %s, from the %s: ends in %.0f s, renewed in %.0f s",
            kept.file.audience or "the API server",
            kept.file.path,
            self._minter.identity,
            minted.expires_at_s - now_s,
            kept.due_s - now_s,
        )

    def _write(self, file: TokenFile, minted: Minted) -> None:
        """Raises OSError and UnavailableError. In place: small files, in memory where secrets are."""
        token = file.token_path
        folder = token.parent
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_folder:
            self._replace(folder / AUTHORITY_FILE, self._authority(), PUBLIC_MODE)
            self._replace(folder / NAMESPACE_FILE, self.namespace.encode(), PUBLIC_MODE)
        self._replace(token, minted.token.encode(), PRIVATE_MODE)

    def _replace(self, path: Path, content: bytes, mode: int) -> None:
        if mode == PUBLIC_MODE and _holds(path, content):
            return  # who watches it need not look
        write_atomically(path, content, mode, self._owner)


def make_token_files(settings: KubernetesSettings, access: Access | None = None) -> TokenFiles:
    """Token files by what krun is told; `access` None: by the kubeconfig, or as a pod.

    Raises:
        UnavailableError: there is no API server that we have access to.
        ConfigError: the kubeconfig is wrong.
    """
    from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
    from shared.credentials.kubernetes.kubernetes_discovery import find_access
    from shared.credentials.kubernetes.kubernetes_tokens import KubernetesTokens

    access = access or find_access(settings.access)
    namespace = settings.namespace or access.namespace
    try:
        minter = KubernetesTokens(
            KubernetesApi(access), namespace, settings.service_account, lifetime_s=int(settings.lifetime_s)
        )
    except ValueError as error:
        raise UnavailableError(f"namespace of {access.server}: {error}") from error
    return TokenFiles(
        settings.files,
        minter,
        namespace=namespace,
        authority=access.authority_pem,
        owner=settings.owner,
    )


def _holds(path: Path, content: bytes) -> bool:
    try:
        return regular_files.read(path, len(content)) == content
    except OSError:
        return False
