"""google-auth at work: in a thread of its own, over its own transport (urllib3), with a deadline.

What google-auth and urllib3 say of a failure is not repeated anywhere, for it quotes answers, files and URLs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import logging
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import google.auth.transport.urllib3
import urllib3
from google.auth import exceptions
from urllib3.exceptions import HTTPError, NewConnectionError, SSLError
from urllib3.exceptions import TimeoutError as LateError

from shared.address import is_own_machine
from shared.credentials.token_sources.token_answers import MAX_ANSWER_BYTES, said
from shared.credentials.token_sources.token_settings import target_of
from shared.errors import TokenError
from shared.net.dial import reason
from shared.net.http1 import Response, Target
from shared.net.tls.contexts import ALPN_HTTP1, client_context

T = TypeVar("T")

for _name in ("urllib3", "google.auth.transport.urllib3"):  # their lines quote URLs, headers and bodies
    logging.getLogger(_name).setLevel(logging.CRITICAL)

MOST_STEPS = 3
"""Exchanges towards one token: AWS' metadata service has two before Google's STS."""

METADATA_HOSTS = ("fd00:ec2::254", "metadata.google.internal")
"""Metadata services that are asked in the clear, besides those at link-local addresses (169.254.169.254)."""

RETRIED_STATUSES = frozenset((408, 429, *range(500, 600)))
"""What google-auth would try again itself, up to three times, asleep in its thread meanwhile. The token cache
has its own pace."""


class Answer(NamedTuple):
    """What google-auth's transport looks at in an answer."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class Exchanges:
    """The exchanges towards one token, with bounds: google-auth's transport calls it in place of a pool of
    urllib3's. It follows no redirection and repeats nothing."""

    def __init__(self, step_timeout_s: float, tls: ssl.SSLContext) -> None:
        """`step_timeout_s` bounds each exchange in seconds, MOST_STEPS times as much all of them."""
        self.deadline = time.monotonic() + MOST_STEPS * step_timeout_s
        self._step_timeout_s = step_timeout_s
        self._http = urllib3.PoolManager(retries=False, ssl_context=tls)
        self.given_up = False
        """Set when nobody waits for the token any more: nothing further is asked."""
        self.failure = ""
        """What the last exchange came to: a reason, or empty when it was answered with 200."""
        self.reason = "file"
        """The same as one of TOKEN_REASONS; with `failure` empty: why there was no token all the same."""
        self.answered = ""
        """Who has answered last."""

    def request(
        self,
        method: str,
        url: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: object,
    ) -> Answer:
        """The whole answer. Raises HTTPError when there is none, or one that google-auth would retry."""
        if options.get("cert"):
            raise self._failed("credentials that are used over mTLS (X.509 federation) are not supported")
        left_s = min(self._step_timeout_s, self.deadline - time.monotonic())
        if self.given_up or left_s <= 0:
            raise HTTPError("given up")
        self.reason = "unreachable"
        try:
            target = check_url(url)
        except ValueError as error:
            raise self._failed(str(error)) from None
        try:
            answer = self._exchange(target, method, url, body, headers, time.monotonic() + left_s)
        except (NewConnectionError, SSLError) as error:
            raise self._failed(f"cannot connect to {target}: {_cause(error)}") from None
        except LateError:
            late = f"no complete answer from {target} within {self._step_timeout_s:g} s"
            raise self._failed(late) from None
        except HTTPError:
            broken = f"broken answer from {target}: it is no complete HTTP/1.1 response"
            raise self._failed(self.failure or broken) from None
        self.answered = str(target)
        self.failure, self.reason = "", "garbled"
        if answer.status != 200:
            self.reason = "refused"
            response = Response(answer.status, dict(answer.headers), answer.data)
            self.failure = f"{target} answered {said(response)}"
        if answer.status in RETRIED_STATUSES:
            raise HTTPError("not now")
        return answer

    def close(self) -> None:
        """Lets go of the connections."""
        self._http.clear()

    def _failed(self, failure: str) -> HTTPError:
        self.failure = failure
        return HTTPError("no answer")

    def _exchange(
        self,
        target: Target,
        method: str,
        url: str,
        body: bytes | str | None,
        headers: Mapping[str, str] | None,
        deadline: float,
    ) -> Answer:
        self.failure = ""
        streamed = self._http.request(
            method,
            url,
            body=body,
            headers={**(headers or {}), "connection": "close"},
            timeout=deadline - time.monotonic(),
            retries=False,
            preload_content=False,
        )
        content = b""
        try:
            # urllib3's timeout is for each read. Nothing is unpacked, for the bound is on what is kept.
            while part := streamed.read1(MAX_ANSWER_BYTES, decode_content=False):
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise self._failed(f"answer from {target} is longer than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() >= deadline:
                    raise LateError
        finally:
            streamed.close()
        return Answer(streamed.status, streamed.headers, content)


def _cause(error: BaseException) -> str:
    """Why a connection was not made, without the address that urllib3 puts into it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return reason(seen) if seen is not None else "TLS failed"


def check_url(url: str) -> Target:
    """Where `url` leads. Raises ValueError where secrets would go to another machine in the clear."""
    target = target_of(url)
    if target.scheme == "https" or is_own_machine(target.host) or target.host in METADATA_HOSTS:
        return target
    with contextlib.suppress(ValueError):  # raised for what is no address
        if ipaddress.ip_address(target.host).is_link_local:
            return target
    raise ValueError(f"{target} would have to be asked over https, for others can read what is in the clear")


class Request(google.auth.transport.urllib3.Request):
    """google-auth's own transport."""

    http: Exchanges


async def in_thread(
    place: str,
    work: Callable[[Request], T],
    *,
    step_timeout_s: float,
    tls: ssl.SSLContext | None,
    without_answer: str = "google-auth cannot use it",
) -> T:
    """What `work` returns, run in a thread with a request that google-auth can use.

    Raises TokenError, naming `place`, for whatever goes wrong, `without_answer` being the reason if nobody
    was asked at all; also when it is not done within MOST_STEPS times `step_timeout_s` seconds. Then, and
    when its caller is cancelled, the thread asks nobody any more and ends with its present exchange.
    """
    now_s = asyncio.get_running_loop().time()
    exchanges = Exchanges(step_timeout_s, tls or client_context(None, now_s, ALPN_HTTP1))

    def told() -> T:
        try:
            return work(Request(exchanges))  # type: ignore[no-untyped-call]
        except FAILURES:
            if exchanges.failure:
                reason = exchanges.failure
            elif exchanges.answered:
                reason = f"{exchanges.answered} gave an answer without a token"
            else:
                reason = without_answer
            # Without the original: google-auth's errors quote answers and files.
            raise TokenError(f"no token with {place}: {reason}", exchanges.reason) from None
        finally:
            exchanges.close()

    allowed_s = MOST_STEPS * step_timeout_s
    try:
        async with asyncio.timeout(allowed_s):
            return await asyncio.wrap_future(_daemon(told))
    except TimeoutError as error:
        raise TokenError(f"no token with {place} within {allowed_s:g} s", "unreachable") from error
    finally:
        exchanges.given_up = True


def _daemon(work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """The result of `work`, in a thread that the end of the process does not wait for: a federation's program
    may take two minutes, and Kubernetes waits for half of one. The token cache bounds how many there are."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="google-auth", daemon=True).start()
    return future


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
