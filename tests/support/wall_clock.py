"""A wall clock that a test turns, and minters whose tokens live by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.credentials.tokens.minting import Minted
from shared.errors import TokenError
from tests.support.metadata_server import PATIENCE_S, Answer, Request, unsigned_token

START = 1_790_000_000.0


class Clock:
    """Stands still until turned."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


class Mint:
    """A metadata server's answer: each request gets a new token of `lifetime_s`, numbered in its claims."""

    def __init__(self, clock: Callable[[], float], lifetime_s: float = 3600) -> None:
        self.clock, self.lifetime_s = clock, lifetime_s
        self.minted: list[str] = []

    def __call__(self, request: Request) -> Answer:
        serial = len(self.minted)
        self.minted.append(
            unsigned_token(aud=request.audience, exp=self.clock() + self.lifetime_s, serial=serial)
        )
        return Answer(self.minted[-1].encode() + b"\n")


class HandMinter:
    """A `Minter` whose requests are answered by the test, one by one."""

    def __init__(self, clock: Callable[[], float], identity: str = "somebody") -> None:
        self.identity = identity
        self.asked: list[str] = []
        """The audience of each request, in order."""
        self.waiting: dict[str, asyncio.Future[Minted]] = {}
        """Requests without an answer, by audience."""
        self._clock = clock
        self._serial = 0
        self._changed = asyncio.Event()

    async def mint(self, audience: str) -> Minted:
        assert audience not in self.waiting, "two requests for one key"
        self.asked.append(audience)
        self._changed.set()
        waiting = self.waiting[audience] = asyncio.get_running_loop().create_future()
        try:
            return await waiting
        finally:
            self.waiting.pop(audience, None)

    async def is_asked_for(self, audience: str) -> None:
        """Returns once there is a request for it that has no answer."""
        async with asyncio.timeout(PATIENCE_S):
            while audience not in self.waiting:
                self._changed.clear()
                await self._changed.wait()

    def give(self, audience: str, lifetime_s: float = 3600.0) -> str:
        """Answers with a new token, which is returned."""
        self._serial += 1
        expires_at_s = self._clock() + lifetime_s
        token = unsigned_token(aud=audience, exp=expires_at_s, serial=self._serial)
        self.waiting.pop(audience).set_result(Minted(token, expires_at_s))
        return token

    def fail(self, audience: str, text: str = "no token from somebody: not today") -> None:
        """Answers with an error."""
        self.waiting.pop(audience).set_exception(TokenError(text, "refused"))
