"""Asking for a tunnel: the request is sent, the answer judged, and the request perhaps sent again.

The one driver of that. Its `Upstream` decides who is asked, and with which token; `Retries` decides which
answers are worth another attempt.

An opening goes one of two ways:

1. `begin` asks without waiting, if the upstream can. The answer comes by callback: there is no task, and no
   timer of its own.
2. `run`, in a task, does whatever has to be waited for: a connection, a token, a pause. It goes on from where
   `begin` got, if that was interrupted (another answer than 200, a broken stream, no answer in time).

The client's first flight goes with the request: the far side has it as soon as it is connected, a round trip
earlier. It stays with whoever opens the tunnel until the answer is 200, and goes with each attempt. So it may
only be what can arrive more than once: the beginning of a TLS connection, whose 0-RTT data can be replayed by
anybody in any case (RFC 8446 section 8), or an SSH identification.

The rules, whichever way it goes:

1. All attempts and the pauses between them have `timeout_s` together. If a pause would take longer than what
   is left, it is not begun: the answer that asked for it is final, at once. With `cold_start_s` they have
   that time, if it is longer, from the first failure on that a starting service may cause, as long as few
   enough others wait for the same origin.
2. An attempt is let go of before the next begins. Only of the final answer are the first bytes read, for the
   log.
3. After a 401 the token is dropped, and asked for once more. Another attempt is made only with another token
   than the rejected one.
4. Nothing more is asked once the opening is abandoned. While an answer is awaited its stream stays, and is
   reset when it is answered. A client can come and go a thousand times a second: so many resets of unanswered
   streams look like a rapid reset (CVE-2023-44487) to the far side, which then ends the connection with all
   its tunnels.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from http import HTTPStatus

from shared.errors import LimitError, StatusError, StreamResetError, UpstreamError
from shared.http2.events import Headers
from shared.http2.frames import CANCEL, REFUSED_STREAM
from shared.net.http2.answers import AskedOf, refusal
from shared.net.legs.stream import Stream, header_value, status_of
from shared.tunnel.deadlines import Deadlines
from shared.tunnel.retry import (
    CONNECT,
    CONNECTION_LOST,
    NO_ANSWER,
    REFUSED,
    STARTING_STATUSES,
    Retries,
    Retry,
    RetryBudget,
    RetryRules,
    retry_after_s,
)

log = logging.getLogger("hbone.upstream")

OK = HTTPStatus.OK.value  # Python 3.11 takes 0.2 µs to look one up in its enum


class Upstream(ABC):
    """Who is asked for one tunnel. Times are the loop's, in seconds. What is not abstract is for an upstream
    that always has to wait, and has no other token."""

    @property
    @abstractmethod
    def asked_of(self) -> AskedOf:
        """What the status of a refusal depends on."""

    def request_now(self) -> Stream | None:
        """Sends the request, if nothing has to be waited for; else None."""
        return None

    @abstractmethod
    async def prepare(self, deadline: float) -> float:
        """Gets what the next request needs. Returns how many seconds of that do not count towards the
        deadline. Raises HboneError if it cannot be had."""

    @abstractmethod
    async def request(self, deadline: float) -> Stream:
        """Sends the request, after `prepare`. Raises HboneError if it could not be sent by the deadline."""

    def accepted(self) -> None:  # noqa: B027  # most have nothing to do
        """The answer is 200."""

    def reject_token(self) -> bool:
        """The answer is 401. False if another token is not worth an attempt: none was sent, or this is not
        the first that was rejected."""
        return False

    async def renew_token(self) -> bool:
        """Gets another token, after `reject_token`; False if it is the same one. Raises HboneError."""
        return False

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:  # noqa: B027  # likewise
        """For the metrics: it is asked once more, or, if `over_budget`, would have been."""

    def starting(self, waits: bool) -> None:  # noqa: B027  # likewise
        """For the metrics: from now on it waits for its service to start, or does no longer."""

    def too_many_start(self) -> str:
        """Why nobody more may wait for a service to start, if so: it is about all services together."""
        return ""

    def release(self, stream: Stream) -> None:
        """Lets go of an attempt before the next one."""
        stream.close()


class Opening:
    """One tunnel that is asked for. Its owner calls `begin`, and `run` in a task if that returns False or
    calls `interrupted`; or `run` alone. What has been learnt so far is in the attributes."""

    # Short-lived and made for each tunnel: what has a default costs nothing until it is set.
    attempts = 0
    """How often the request was sent, or tried to be."""
    stream_id: int | None = None
    """Number of the last attempt's stream on its connection."""
    status: int | None = None
    """HTTP status of the last attempt's answer."""
    first_flight = b""
    """What is sent right after each request."""
    awaiting_answer = False
    """A stream is open and not answered yet (rule 4)."""

    _answered: Callable[[Stream], None]
    _interrupted: Callable[[], None]
    _deadline = 0.0
    _abandoned = False
    _cold_start_s = 0.0
    _in_budget = False
    _is_starting = False  # it waits for the service to start, and is counted
    _retries: Retries | None = None
    _stream: Stream | None = None  # that `begin` asked on, until `run` or the owner has it
    _why_not = ""  # a retry that the rules allow was not made, for the log

    def __init__(
        self,
        upstream: Upstream,
        timeout_s: float,
        rules: RetryRules,
        *,
        budget: RetryBudget | None = None,
        deadlines: Deadlines[Opening] | None = None,
        first_flight: bytes = b"",
        cold_start_s: float = 0.0,
    ) -> None:
        """`budget` is shared by all openings to one origin; `deadlines` calls `overdue`, and is needed for
        `begin`. `cold_start_s` is what a service may take to start; 0: it is not waited for."""
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._rules = rules
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()
        self._budget: RetryBudget | None = budget or RetryBudget()  # None: left
        self._budget.requests += 1
        if first_flight:
            self.first_flight = first_flight
        if cold_start_s:
            self._cold_start_s = cold_start_s

    # Without waiting.

    def begin(self, answered: Callable[[Stream], None], interrupted: Callable[[], None]) -> bool:
        """Asks at once; False if it cannot. Then either `answered(stream)` is called, once the answer is 200,
        with a stream on which only the first flight has been sent; or `interrupted()`, and `run` has to go
        on."""
        assert self._deadlines is not None
        stream = self._upstream.request_now()
        if stream is None:
            return False
        self._answered = answered
        self._interrupted = interrupted
        self._stream = stream
        self.attempts = 1
        self.stream_id = stream.id
        self.awaiting_answer = True
        self._send_first_flight(stream)
        stream.on_response = self._responded
        stream.on_gone = self._broke
        self._deadline = self._loop.time() + self._timeout_s
        self._deadlines.add(self, self._deadline)
        return True

    def overdue(self) -> None:
        """The deadline has come without an answer."""
        self._interrupt()

    def abandon(self) -> bool:
        """Nobody wants the tunnel any more. True if the owner is to `cancel` it; False while an answer is
        awaited: then it ends as ever, but nothing is asked again (rule 4)."""
        self._abandoned = True
        return not self.awaiting_answer

    def cancel(self) -> None:
        """Resets the stream of `begin`, if `run` does not have it; nobody is called back."""
        stream = self._unhook()
        if stream is not None:
            stream.abort()
        self._leave_budget()

    def _responded(self, headers: Headers) -> None:
        if status_of(headers) != OK:
            self._interrupt()
            return
        stream = self._unhook()
        assert stream is not None
        self._leave_budget()
        self._accept(stream)
        self._answered(stream)

    def _broke(self, _: StreamResetError) -> None:
        self._interrupt()  # the stream keeps the error

    def _interrupt(self) -> None:
        """Leaves the stream to `run`; until then it counts as unanswered still."""
        self._stream = self._unhook()
        self._interrupted()

    def _unhook(self) -> Stream | None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.on_response = stream.on_gone = None
            assert self._deadlines is not None
            self._deadlines.drop(self)
        return stream

    def _send_first_flight(self, stream: Stream) -> None:
        if self.first_flight:
            stream.write(self.first_flight)

    # With waiting.

    async def run(self) -> Stream:
        """A stream that was answered with 200, on which only the first flight has been sent.

        Raises:
            StatusError: the answer is final, and another than 200.
            UpstreamError: no answer in time, or the stream broke.
            HboneError: what the upstream raises, if nothing could be sent.
        """
        try:
            return await self._attempts()
        finally:
            self._leave_budget()

    async def _attempts(self) -> Stream:
        stream, self._stream = self._stream, None
        if stream is None:
            self._deadline = self._loop.time() + self._timeout_s
        while True:
            outcome = await (self._ask() if stream is None else self._answer(stream))
            if isinstance(outcome, Stream):
                return outcome
            stream = None
            if outcome.wait_s:
                await asyncio.sleep(outcome.wait_s)

    async def _ask(self) -> Stream | Retry:
        """One attempt."""
        try:
            self._deadline += await self._upstream.prepare(self._deadline)
            self.attempts += 1
            self.status = None
            stream = await self._upstream.request(self._deadline)
        except StreamResetError as error:  # the connection accepts no new stream by now
            retry = self._after_reset(error, connection_lost=False, answered_before=False)
            if retry is None or not self._may(retry):
                raise
            return retry
        except UpstreamError as error:
            retry = self._judge().while_starting(CONNECT) if self._cold_start_s and error.passes else None
            if retry is None or not self._may(retry):
                if self._why_not:
                    error.args = (f"{error}{self._why_not}",)
                raise
            return retry
        self.stream_id = stream.id
        self._send_first_flight(stream)
        return await self._answer(stream)

    async def _answer(self, stream: Stream) -> Stream | Retry:
        """`stream` once it is answered with 200. Raises what is final."""
        try:
            retry = await self._outcome(stream)
        except BaseException:
            stream.abort()
            raise
        if retry is None:
            return stream
        self._upstream.release(stream)
        return retry

    @property
    def _left_s(self) -> float:
        return self._deadline - self._loop.time()

    async def _outcome(self, stream: Stream) -> Retry | None:
        """None if the answer is 200. Raises what is final."""
        connection = stream.connection
        self.awaiting_answer = True
        try:
            status = await self._status_of(stream)
        except StreamResetError as error:
            retry = self._after_reset(
                error, connection_lost=connection.lost, answered_before=connection.has_answered
            )
            if self._may(retry):
                return retry
            raise
        except UpstreamError as error:  # of all attempts together
            if self._is_starting and self._may(retry := self._judge().while_starting(NO_ANSWER)):
                return retry
            raise UpstreamError(f"no response headers within {self._most_s:g} s{self._why_not}") from error
        finally:
            self.awaiting_answer = False
        if status == OK:
            self._accept(stream)
            return None
        self.status = status
        connection.has_answered = True
        retry = await self._after_status(stream, status)
        if self._may(retry):
            return retry
        final = await refusal(stream, status, self._upstream.asked_of)
        raise StatusError(status, f"{final}{self._why_not}")

    async def _status_of(self, stream: Stream) -> int:
        """The answer's. Raises UpstreamError if there is none in time."""
        left_s = self._left_s
        if self._is_starting:
            return await stream.response(min(left_s, max(self._timeout_s, self._rules.unanswered_s)))
        try:
            return await stream.response(left_s)
        except StreamResetError:
            raise
        except UpstreamError:
            if self._abandoned or not self._cold_start_s or not self._wait_for_start(NO_ANSWER):
                raise
        # The front end may hold the request until the service is there, and it keeps its turn.
        return await stream.response(min(self._left_s, self._rules.unanswered_s))

    def _after_reset(
        self, error: StreamResetError, *, connection_lost: bool, answered_before: bool
    ) -> Retry | None:
        retry = self._judge().after_reset(
            error.code, connection_lost=connection_lost, answered_before=answered_before
        )
        if not self._cold_start_s or (retry is not None and not retry.wait_s):
            return retry
        if error.code == REFUSED_STREAM:
            return self._judge().while_starting(REFUSED)
        if connection_lost and error.code == CANCEL:  # else it ended by a fault of protocol
            return self._judge().while_starting(CONNECTION_LOST)
        return None

    def _accept(self, stream: Stream) -> None:
        self.status = OK
        self.awaiting_answer = False
        stream.connection.has_answered = stream.connection.has_carried = True
        self._upstream.accepted()

    async def _after_status(self, stream: Stream, status: int) -> Retry | None:
        if status != HTTPStatus.UNAUTHORIZED:
            asked_s = retry_after_s(header_value(stream.headers, b"retry-after"), time.time())
            if self._cold_start_s and status in STARTING_STATUSES:
                return self._judge().while_starting(STARTING_STATUSES[status], asked_s)
            return self._judge().after_status(status, asked_s)
        if not self._upstream.reject_token():
            return None
        retry = self._judge().after_rejected_token()
        if retry is None:
            return None
        began = self._loop.time()
        try:
            is_new = await self._upstream.renew_token()
        except LimitError as error:
            self._why_not = f"; not asked again: {error}"
            return None
        self._deadline += self._loop.time() - began
        return retry if is_new else None

    def _judge(self) -> Retries:
        if self._retries is None:
            self._retries = Retries(self._rules)
        return self._retries

    def _may(self, retry: Retry | None) -> bool:
        """Whether somebody still waits, there is time, and room in the budget for a retry after a pause."""
        if retry is None or self._abandoned:
            return False
        if retry.is_for_start and not self._wait_for_start(retry.reason):
            return False
        if retry.wait_s >= self._left_s:
            self._why_not = f"; not asked again: no time for a pause of {retry.wait_s:.3g} s"
            return False
        if retry.wait_s and not retry.is_for_start and not self._in_budget:
            budget = self._budget
            assert budget is not None  # left at the end only
            if not budget.has_room(self._rules.budget_percent):
                self._upstream.retrying(retry.reason, over_budget=True)
                self._why_not = f"; not asked again: {budget.retries} requests are retries already"
                return False
            budget.retries += 1
            self._in_budget = True
        log.debug("%s: %s, once more in %.3g s", self._upstream, retry.reason, retry.wait_s)
        self._upstream.retrying(retry.reason)
        return True

    def _wait_for_start(self, reason: str) -> bool:
        """Gives the service the time that it may take to start, unless too many wait for that already."""
        if self._is_starting:
            return True
        budget = self._budget
        assert budget is not None  # left at the end only
        if budget.starting >= self._rules.max_starting:
            too_many = f"{budget.starting} wait for it to start, the most that may"
        else:
            too_many = self._upstream.too_many_start()
        if too_many:
            self._upstream.retrying(reason, over_budget=True)
            self._why_not = f"; not asked again: {too_many}"
            return False
        budget.starting += 1
        self._is_starting = True
        self._deadline += self._most_s - self._timeout_s
        self._upstream.starting(True)
        return True

    @property
    def _most_s(self) -> float:
        """What all attempts have together, without what tokens take."""
        return max(self._cold_start_s, self._timeout_s) if self._is_starting else self._timeout_s

    def _leave_budget(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.requests -= 1
            budget.retries -= self._in_budget
            if self._is_starting:
                budget.starting -= 1
                self._upstream.starting(False)
