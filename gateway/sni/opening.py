"""One tunnel's way to its 200: the request and its token, its stream, the answer, and asking once more.

Owned here: what happens in which order. Which answers are worth another attempt, with their sources, is
`shared/tunnel/retry.py`'s; what openings share is `upstream.py`'s.

An opening goes one of two ways:

1. `begin` asks without waiting, where a token is at hand and a pooled connection has room, which is nearly
   always so. The answer comes by callback; a 200 is told by `Asking.answered`. There is no task, and no timer
   of its own.
2. Whatever has to be waited for (a token, a connection, room, a pause) or went wrong (another answer, a
   broken stream, no answer in time) is told by `Asking.has_to_wait`: a task then goes on with `run`, from
   where `begin` got.

The rules, whichever way it goes:

1. All attempts and the pauses between them have `response_timeout_s` together. A pause that would outlast it
   is not begun: the answer that asks for it is final, at once.
2. An attempt is let go of before the next begins, its stream reset with CANCEL if it is not over. Only of
   the answer that is final the first bytes are read, for the log.
3. A token that is not at hand is asked for once a connection to the origin stands: a name that leads nowhere,
   or to somebody else, costs none. As long as no tunnel was opened with a token for its audience, it is one
   of a bounded number (`new_audiences.py`), which is checked before anything is dialled. The time that a
   token takes does not count towards the deadline.
4. After a 401 the token is dropped and asked for once more. Only another token than the one that was rejected
   is worth an attempt, so without a token, with a file that has not changed and with a metadata server that
   sticks to its token the 401 is final. After a pause the token is asked for anew, too: it may have ended.
5. The traceparent stays: it is one tunnel, however often it is asked for.
6. Nothing more is asked for a client that has gone. Whoever notices that cancels the opening, except while an
   answer is awaited: that stream is let go of when it is answered. A client can come and go a thousand times
   a second, and as many unanswered streams reset would be a rapid reset (CVE-2023-44487) in the far side's
   eyes, for which it ends the connection with everybody's tunnels.
"""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus
from typing import Protocol

from gateway.rules.routes import Target
from gateway.sni.upstream import Upstreams
from shared.errors import LimitError, StatusError, StreamResetError, UpstreamError
from shared.http2.events import Headers
from shared.net.http2.answers import AskedOf, refusal
from shared.net.legs.stream import Stream, header_value, status_of
from shared.tunnel.retry import (
    Retries,
    Retry,
    RetryBudget,
    retry_after_s,
)

log = logging.getLogger("hbone.upstream")


class Asking(Protocol):
    """Who wants a stream. What is learnt on the way is written into it, for its line in the access log."""

    @property
    def peer(self) -> str:
        """The client, HOST:PORT."""

    @property
    def route(self) -> str:
        """The host glob of its route."""

    @property
    def traceparent(self) -> bytes:
        """W3C trace context of the tunnel."""

    @property
    def gone(self) -> bool:
        """The client is not there any more."""

    awaiting_answer: bool
    """A stream is open and not answered yet: not to be cancelled for the client's sake."""

    stream_id: int | None
    """Number of the last stream on its connection."""

    status: int | None
    """HTTP status of the last attempt's answer."""

    attempts: int
    """How often a stream was asked for."""

    def answered(self, stream: Stream) -> None:
        """The far side has said 200 on `stream`, on which nothing has been sent yet."""

    def has_to_wait(self) -> None:
        """A task is to go on with the opening's `run`."""


class Opening:
    """A way to a stream to one tunnel's target; to be begun, and cancelled when given up."""

    __slots__ = (
        "_asking",
        "_budget",
        "_deadline",
        "_in_budget",
        "_loop",
        "_request",
        "_retries",
        "_rules",
        "_source",
        "_stream",
        "_token",
        "_token_dropped",
        "_upstreams",
        "_why_not",
    )

    def __init__(self, upstreams: Upstreams, asking: Asking, target: Target) -> None:
        self._upstreams = upstreams
        self._asking = asking
        self._request = request = upstreams.request_of(target)
        self._budget: RetryBudget | None = upstreams.enter(request.origin)  # None: left
        self._in_budget = False
        self._rules = upstreams.rules
        self._retries: Retries | None = None
        self._source = upstreams.tokens.of(request.target.token)
        self._token: str | None = None
        self._token_dropped = False
        self._loop = upstreams.loop
        self._deadline: float | None = None  # none before the first attempt
        self._stream: Stream | None = None  # that `begin` asked on, until somebody takes it over
        self._why_not = ""  # a retry that the rules allow was not made, for the log

    # Without waiting.

    def begin(self) -> None:
        """Asks at once, if it can be; else says that it has to wait."""
        token = self._source.at_hand()
        if token is not None:
            self._token = token or None
            self._deadline = self._loop.time() + self._upstreams.response_timeout_s
            stream = self._upstreams.pool.open_now(self._request.origin, self._headers())
            if stream is not None:
                asking = self._asking
                asking.attempts = 1
                asking.stream_id = stream.id
                asking.awaiting_answer = True
                self._stream = stream
                stream.on_response = self._responded
                stream.on_gone = self._broke
                self._upstreams.await_answer(self, self._deadline)
                return
        self._asking.has_to_wait()

    def overdue(self) -> None:
        """The deadline has come without an answer."""
        self._go_on()

    def cancel(self) -> None:
        """Lets go of what `begin` has asked for, and `run` has not taken over; nobody is told."""
        stream = self._unhook()
        if stream is not None:
            stream.abort()
        self._leave_budget()

    def _responded(self, headers: Headers) -> None:
        stream = self._stream
        if stream is None or status_of(headers) != HTTPStatus.OK:
            self._go_on()
            return
        self._unhook()
        self._leave_budget()
        self._source.accepted()
        stream.connection.has_answered = stream.connection.has_carried = True
        self._asking.status = HTTPStatus.OK
        self._asking.awaiting_answer = False
        self._asking.answered(stream)

    def _broke(self, _: StreamResetError) -> None:
        self._go_on()  # the stream keeps the error

    def _go_on(self) -> None:
        """Leaves the stream to `run`; until then it counts as unanswered still, and is not cancelled."""
        stream = self._unhook()
        self._stream = stream
        self._asking.has_to_wait()

    def _unhook(self) -> Stream | None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.on_response = stream.on_gone = None
            self._upstreams.await_no_more(self)
        return stream

    # With waiting.

    async def run(self) -> Stream:
        """A stream that was answered with 200, on which nothing has been sent yet; goes on from where `begin`
        got.

        Raises:
            TokenError: there should be a token and is none; nothing was sent with another.
            LimitError: it was not asked for, as one too many.
            UpstreamError: the far side cannot be reached, broke off or answered with something else than 200.
            LimitError: too many names are being looked up for the client.
        """
        try:
            return await self._attempts()
        finally:
            self._leave_budget()

    async def _attempts(self) -> Stream:
        stream, self._stream = self._stream, None
        if stream is None:
            self._deadline = self._loop.time() + self._upstreams.response_timeout_s
            await self._get_token()
        while True:
            if stream is None:
                asking, upstreams = self._asking, self._upstreams
                asking.attempts += 1
                asking.status = None
                await upstreams.look_up(self._request, asking.peer, self._left_s)
                stream = await upstreams.pool.of(self._request.origin).open(self._headers(), self._left_s)
                asking.stream_id = stream.id
            try:
                retry = await self._outcome(stream)
            except BaseException:
                stream.abort()
                raise
            if retry is None:
                return stream
            stream.close()
            stream = None
            log.debug("%s: %s, once more in %.3g s", self._request.origin, retry.reason, retry.wait_s)
            if retry.wait_s:
                await asyncio.sleep(retry.wait_s)
                await self._get_token()

    async def _get_token(self) -> None:
        """The token for the next attempt."""
        token = self._source.at_hand()
        if token is None:
            if self._source.is_new:
                self._upstreams.new_audiences.check(self._asking.peer, self._audience)
            await self._upstreams.look_up(self._request, self._asking.peer, self._left_s)
            await self._upstreams.pool.of(self._request.origin).connected(self._left_s)
            token = await self._ask_for_token()
        self._token = token or None

    async def _ask_for_token(self) -> str | None:
        began = self._loop.time()
        token = await self._source.token(self._admit)
        if self._deadline is not None:
            self._deadline += self._loop.time() - began
        return token

    def _admit(self) -> None:
        self._upstreams.new_audiences.spend(self._asking.peer, self._audience)

    @property
    def _audience(self) -> str:
        return self._request.target.token.value

    @property
    def _left_s(self) -> float:
        assert self._deadline is not None
        return self._deadline - self._loop.time()

    def _headers(self) -> Headers:
        asking = self._asking
        return self._request.headers(asking.peer, asking.traceparent, self._token)

    async def _outcome(self, stream: Stream) -> Retry | None:
        """None if the answer is 200; raises what is final."""
        upstreams, asking = self._upstreams, self._asking
        connection = stream.connection
        asking.awaiting_answer = True
        try:
            status = await stream.response(self._left_s)
        except StreamResetError as error:
            retry = self._ask_rules().after_reset(
                error.code,
                connection_lost=connection.lost,
                answered_before=connection.has_answered,
            )
            if self._may(retry):
                return retry
            raise
        except UpstreamError as error:
            timeout_s = upstreams.response_timeout_s  # of all attempts together
            raise UpstreamError(f"no response headers within {timeout_s:g} s") from error
        finally:
            asking.awaiting_answer = False
        asking.status = status
        connection.has_answered = True
        if status == HTTPStatus.OK:
            self._source.accepted()
            connection.has_carried = True
            return None
        retry = await self._after_status(stream, status)
        if self._may(retry):
            return retry
        in_mesh = self._request.target.method == "CONNECT"
        final = await refusal(stream, status, AskedOf(token_sent=self._token is not None, in_mesh=in_mesh))
        raise StatusError(status, f"{final}{self._why_not}")

    async def _after_status(self, stream: Stream, status: int) -> Retry | None:
        if status != HTTPStatus.UNAUTHORIZED:
            asked_s = retry_after_s(header_value(stream.headers, b"retry-after"), time.time())
            return self._ask_rules().after_status(status, asked_s)
        rejected = self._token
        if rejected is None or self._token_dropped:
            return None
        self._token_dropped = True
        self._source.invalidate(rejected)  # it may have been revoked before its time
        retry = self._ask_rules().after_rejected_token()
        if retry is None:
            return None
        try:
            self._token = await self._ask_for_token()
        except LimitError as error:
            self._why_not = f"; not asked again: {error}"
            return None
        return retry if self._token != rejected else None

    def _ask_rules(self) -> Retries:
        if self._retries is None:
            self._retries = Retries(self._rules)
        return self._retries

    def _may(self, retry: Retry | None) -> bool:
        """Whether somebody still waits, there is time, and room in the budget for a retry after a pause."""
        if retry is None or self._asking.gone:
            return False
        counts = self._upstreams.metrics.route(self._asking.route)
        if retry.wait_s >= self._left_s:
            self._why_not = f"; not asked again: no time for a pause of {retry.wait_s:.3g} s"
            return False
        if retry.wait_s and not self._in_budget:
            budget = self._budget
            assert budget is not None  # left at the end only
            if not budget.has_room(self._rules.budget_percent):
                counts.retries_over_budget += 1
                self._why_not = f"; not asked again: {budget.retries} requests are retries already"
                return False
            budget.retries += 1
            self._in_budget = True
        counts.retried(retry.reason)
        return True

    def _leave_budget(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.retries -= self._in_budget
            self._upstreams.leave(self._request.origin, budget)
