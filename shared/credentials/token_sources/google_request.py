"""google-auth's requests made by our own HTTP client: it runs in a thread, its requests on the event loop.

google-auth is written for threads that wait. Here it has a few of its own (`in_thread`), and each request
that it makes in one is carried out on the loop by `http1_client`, with a bound on the answer and what is left
of the deadline, so that neither `requests` nor `urllib3` is needed and nobody waits longer than agreed.

Owned here: that bridge, and what may be told about an exchange that failed. What google-auth itself says is
not repeated anywhere, for it quotes answers. What it is asked for is `google_credentials`' matter.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import ipaddress
import queue
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.auth import exceptions, transport

from shared.credentials.token_sources.token_answers import MAX_ANSWER_BYTES, said
from shared.credentials.token_sources.token_settings import is_own_machine, target_of
from shared.errors import HboneError, TokenError
from shared.net import http1
from shared.net.http1 import Target
from shared.tasks import spawn

T = TypeVar("T")

THREADS = 4
"""Threads of google-auth's: one for each credential at a time, and some that may hang in an executable."""

MOST_STEPS = 3
"""Exchanges towards one token: AWS' metadata service has two before Google's STS."""

HELD_BACK_S = 1.0
"""How much longer the thread waits than the request may take: the loop tells it before."""

METADATA_HOSTS = ("fd00:ec2::254", "metadata.google.internal")
"""Metadata services that are asked in the clear, besides those at link-local addresses (169.254.169.254)."""

RETRIED_STATUSES = frozenset((408, 429, *range(500, 600)))
"""What google-auth would try again itself, up to three times, asleep in its thread meanwhile. The token cache
has its own pace."""


class _Threads:
    """Like an executor, but that nobody waits for its threads at the end of the process: a federation's
    program may take two minutes, and Kubernetes waits for half of one."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]
        self._work = queue.SimpleQueue()
        self._started = 0

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work.put((future, work))
        if self._started < THREADS:
            self._started += 1
            threading.Thread(target=self._serve, name=f"google-auth {self._started}", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work  # what was done is not kept until there is more to do


@functools.cache
def _threads() -> _Threads:
    return _Threads()


class LoopRequest(transport.Request):
    """What google-auth calls for an HTTP exchange, from a thread that is not the loop's.

    Made on the loop. `failure` tells afterwards what went wrong, if something did.
    """

    def __init__(self, deadline: float, step_timeout_s: float, tls: ssl.SSLContext | None) -> None:
        """`deadline` is the loop's time for all requests together, `step_timeout_s` bounds each."""
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._step_timeout_s = step_timeout_s
        self._tls = tls
        self._task: asyncio.Task[None] | None = None
        self._given_up = False
        self.failure = ""
        """What the last exchange came to: a reason, or empty when it was answered with 200."""
        self.reason = "file"
        """The same as one of TOKEN_REASONS; with `failure` empty: why there was no token all the same."""
        self.answered = ""
        """Who has answered last."""

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **options: object,
    ) -> Answer:
        """Raises TransportError when there is no answer, or one that is not to be had again at once."""
        if options.get("cert"):
            self.failure = "credentials that are used over mTLS (X.509 federation) are not supported"
            raise exceptions.TransportError(self.failure)
        content = body.encode() if isinstance(body, str) else body or b""
        outcome: concurrent.futures.Future[http1.Response] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._start, outcome, method, url, dict(headers or {}), content)
            response = outcome.result(self._step_timeout_s + HELD_BACK_S)
        except (TimeoutError, concurrent.futures.CancelledError, RuntimeError) as error:
            # RuntimeError: the loop has been closed meanwhile.
            raise exceptions.TransportError("given up") from error
        except HboneError as error:
            self.failure, self.reason = str(error), "unreachable"
            raise exceptions.TransportError("no answer") from error
        self.answered = str(Target.parse(url))
        self.failure, self.reason = "", "garbled"
        if response.status != 200:
            self.reason = "refused"
            self.failure = f"{self.answered} answered {said(response)}"
        if response.status in RETRIED_STATUSES:
            raise exceptions.TransportError("not now")
        return Answer(response)

    def give_up(self) -> None:
        """Ends the request under way, and refuses further ones; on the loop."""
        self._given_up = True
        if self._task is not None:
            self._task.cancel()

    def _start(
        self,
        outcome: concurrent.futures.Future[http1.Response],
        method: str,
        url: str,
        headers: dict[str, str],
        body: bytes,
    ) -> None:
        if self._given_up:
            outcome.cancel()
            return
        exchange = self._exchange(outcome, method, url, headers, body)
        self._task = spawn(exchange, name="request of google-auth")
        # Without effect on one that has a result: nothing is left waiting when the task is cancelled.
        self._task.add_done_callback(lambda _: outcome.cancel())

    async def _exchange(
        self,
        outcome: concurrent.futures.Future[http1.Response],
        method: str,
        url: str,
        headers: dict[str, str],
        body: bytes,
    ) -> None:
        try:
            check_url(url)
            left_s = self._deadline - self._loop.time()
            response = await http1.request(
                method,
                url,
                headers=headers,
                body=body,
                timeout_s=max(0.0, min(self._step_timeout_s, left_s)),
                max_bytes=MAX_ANSWER_BYTES,
                tls=self._tls,
            )
        except HboneError as error:
            outcome.set_exception(error)
        except ValueError as error:
            outcome.set_exception(TokenError(str(error)))
        else:
            outcome.set_result(response)


class Answer(transport.Response):
    """An answer as google-auth wants to have it."""

    def __init__(self, response: http1.Response) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    @property
    def data(self) -> bytes:
        return self._response.body


def check_url(url: str) -> None:
    """Raises ValueError for a URL that would carry secrets in the clear to another machine."""
    target = target_of(url)
    if target.scheme == "https" or is_own_machine(target.host) or target.host in METADATA_HOSTS:
        return
    with contextlib.suppress(ValueError):  # raised for what is no address
        if ipaddress.ip_address(target.host).is_link_local:
            return
    raise ValueError(f"{target} would have to be asked over https, for others can read what is in the clear")


async def in_thread(
    place: str,
    work: Callable[[LoopRequest], T],
    *,
    step_timeout_s: float,
    tls: ssl.SSLContext | None,
    without_answer: str = "google-auth cannot use it",
) -> T:
    """What `work` returns, run in one of google-auth's threads with a request that it can use.

    Raises TokenError, naming `place`, for whatever goes wrong, `without_answer` being the reason if nobody
    was asked at all; also when it is not done within MOST_STEPS times `step_timeout_s` seconds. Then, and
    when its caller is cancelled, the request under way ends, and with it the thread's work.
    """
    loop = asyncio.get_running_loop()
    allowed_s = MOST_STEPS * step_timeout_s
    request = LoopRequest(loop.time() + allowed_s, step_timeout_s, tls)

    def told() -> T:
        try:
            return work(request)
        except FAILURES:
            if request.failure:
                reason = request.failure
            elif request.answered:
                reason = f"{request.answered} gave an answer without a token"
            else:
                reason = without_answer
            # Without the original: google-auth's errors quote answers and files.
            raise TokenError(f"no token with {place}: {reason}", request.reason) from None

    try:
        async with asyncio.timeout(allowed_s):
            return await asyncio.wrap_future(_threads().submit(told))
    except TimeoutError as error:
        raise TokenError(f"no token with {place} within {allowed_s:g} s", "unreachable") from error
    finally:
        request.give_up()


FAILURES: tuple[type[Exception], ...] = (
    exceptions.GoogleAuthError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    OSError,
    RecursionError,
    subprocess.SubprocessError,
)
"""What google-auth raises: its own errors, and for answers and files of a shape that it did not expect
whatever its parsing stumbles over."""
