"""ID tokens with Google's application default credentials, by google-auth: a key, a federation, a person's
login.

| type | an ID token |
|---|---|
| service_account | its own: a signed JWT for one, at the key's `token_uri` (RFC 7523) |
| impersonated_service_account | of the account that it names, by IAM, with its source's access token |
| external_account | the same, with the federated access token (file, URL, executable, AWS) |
| authorized_user, external_account_authorized_user | none of its own, but for its own client |

With `service_account` set, each type gives a token of that account, by IAM, if it may impersonate it; a type
that leads to an account itself does so through that one. The file is checked before each token, for keys are
rotated.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from shared.credentials.token_sources import google_file
from shared.credentials.token_sources.access_tokens import SCOPE, KeptAccessToken
from shared.credentials.token_sources.google_file import Credentials, Impersonation
from shared.credentials.token_sources.google_request import (
    FAILURES,
    Request,
    check_url,
    in_thread,
)
from shared.credentials.token_sources.impersonation import Impersonated, id_token_url
from shared.credentials.token_sources.token_answers import access_token, jwt_for
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.credentials.tokens.minting import Minted, Minter
from shared.errors import OwnClientError, TokenError
from shared.watched_file import Stamp, stamp

T = TypeVar("T")


class GoogleAccess(KeptAccessToken):
    """The access token of the credentials in a file, as they are when it is asked for."""

    def __init__(
        self,
        settings: TokenSettings,
        *,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """As GoogleCredentials."""
        self._settings = settings
        self._tls = tls
        super().__init__(f"credentials file {settings.credentials or settings.gcloud}", self._asked, now=now)

    async def _asked(self) -> Minted:
        settings = self._settings
        path = google_file.find(settings)
        place = f"credentials file {path}"
        # A file of a person's own machine; the request that follows has a deadline.
        source = _Source(google_file.read(path), place, settings, self._tls, self._now)
        return await _Access(source).access_token()


class GoogleCredentials:
    """Mints ID tokens with the credentials in a file."""

    def __init__(
        self,
        settings: TokenSettings,
        *,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`tls` is for https, None: the system's trust; `now` gives seconds since 1970."""
        self._settings = settings
        self._tls = tls
        self._now = now
        self._read: tuple[Path, Stamp | None] | None = None
        self._minter: Minter | None = None
        self._looking = asyncio.Lock()

    @property
    def identity(self) -> str:
        settings = self._settings
        place = f"credentials file {settings.credentials or settings.gcloud}"
        return f"{settings.service_account} by {place}" if settings.service_account else place

    async def mint(self, audience: str) -> Minted:
        """A new ID token. Raises TokenError."""
        # In a thread and with a deadline, for the file may be on a network's file system; one at a time, for
        # what the file means keeps an access token.
        async with self._looking:
            minter = await in_thread(
                self.identity, self._current, step_timeout_s=self._settings.step_timeout_s, tls=self._tls
            )
        return await minter.mint(audience)

    def _current(self, _: Request) -> Minter:
        """The minter that the file's present content means."""
        path = google_file.find(self._settings)
        version = path, stamp(path)
        if self._minter is None or self._read != version:
            self._minter = self._made(google_file.read(path), f"credentials file {path}")
            self._read = version
        return self._minter

    def _made(self, credentials: Credentials, place: str) -> Minter:
        settings = self._settings
        target = google_file.impersonation(credentials, place)
        source = credentials
        if credentials.kind == "impersonated_service_account":
            source = google_file.judged(
                credentials.info.get("source_credentials"), f"source_credentials of {place}"
            )
            if source.kind == credentials.kind:
                raise TokenError(
                    f"cannot use {place}: its source_credentials are impersonated themselves", "file"
                )
        if settings.service_account and settings.service_account != _account(credentials, target):
            via = (f"projects/-/serviceAccounts/{target.account}",) if target else ()
            url = id_token_url(settings.iam_url, settings.service_account)
            before = target.delegates if target else ()
            target = Impersonation(settings.service_account, url, (*before, *via))
        elif credentials.kind == "service_account":
            target = None
        if target is None:
            return self._direct(credentials, place)
        try:
            check_url(target.id_token_url)
        except ValueError as error:
            raise TokenError(f"cannot use {place}: {error}", "file") from error
        return Impersonated(
            _Access(_Source(source, place, settings, self._tls, self._now)),
            target.account,
            target.id_token_url,
            delegates=target.delegates,
            timeout_s=settings.step_timeout_s,
            tls=self._tls,
            now=self._now,
        )

    def _direct(self, credentials: Credentials, place: str) -> Minter:
        if credentials.kind == "service_account":
            return _Key(credentials, place, self._settings, self._tls, self._now)
        if credentials.kind == "authorized_user":
            return _User(credentials, place, self._settings, self._tls, self._now)
        raise TokenError(f"no ID token with {place}: {credentials.kind} has none of its own; {IMPERSONATE}")


IMPERSONATE = "set HBONE_TOKEN_ACCOUNT (service_account in hgate's file) to a service account to impersonate"


def _account(credentials: Credentials, target: Impersonation | None) -> str:
    """Whom the credentials lead to without further ado, empty for a person."""
    if credentials.kind == "service_account":
        return str(credentials.info["client_email"])
    return target.account if target else ""


@dataclass(frozen=True, slots=True)
class _Source:
    """Credentials, and what it takes to use them."""

    credentials: Credentials
    place: str
    """Where they are, for error texts."""

    settings: TokenSettings
    tls: ssl.SSLContext | None
    now: Callable[[], float]
    """The wall clock, in seconds since 1970."""

    async def run(self, work: Callable[[Request], T], without_answer: str = "google-auth cannot use it") -> T:
        """What `work` returns, in a thread of google-auth's. Raises TokenError."""
        return await in_thread(
            self.place,
            work,
            step_timeout_s=self.settings.step_timeout_s,
            tls=self.tls,
            without_answer=without_answer,
        )


class _Key(_Source):
    """A service account's key: its own ID tokens."""

    @property
    def identity(self) -> str:
        return str(self.credentials.info["client_email"])

    async def mint(self, audience: str) -> Minted:
        def work(request: Request) -> object:
            from google.oauth2 import service_account

            try:
                own = service_account.IDTokenCredentials.from_service_account_info(
                    self.credentials.info, target_audience=audience
                )
            except FAILURES:
                raise TokenError(
                    f"cannot use {self.place}: its private_key is no private key", "file"
                ) from None
            own.refresh(request)
            return own.token

        return jwt_for(await self.run(work), audience, self.place, self.now())


class _User(_Source):
    """A person's login, which gives ID tokens for its own client only."""

    @property
    def identity(self) -> str:
        return f"the user of {self.place}"

    async def mint(self, audience: str) -> Minted:
        if audience != self.credentials.info["client_id"]:
            raise OwnClientError(
                f"no ID token for {audience} with {self.place}: a user's login gives one for its own client "
                f"only; {IMPERSONATE}",
                self.credentials.info["client_id"],
            )

        def work(request: Request) -> object:
            user = _google_auth(self.credentials, self.settings)
            user.refresh(request)
            return user.id_token

        return jwt_for(await self.run(work), audience, self.place, self.now())


class _Access(KeptAccessToken):
    """The access token of credentials of any kind, kept until shortly before its end."""

    def __init__(self, source: _Source) -> None:
        super().__init__(source.place, self._refresh, now=source.now)
        self._source = source

    async def _refresh(self) -> Minted:
        credentials = self._source.credentials
        if credentials.kind == "external_account":
            return await self._source.run(self._refreshed, google_file.subject_source(credentials))
        return await self._source.run(self._refreshed)

    def _refreshed(self, request: Request) -> Minted:
        source = self._source
        # A new one each time: the thread of an attempt that was given up may still be at work on its own.
        try:
            own = _google_auth(source.credentials, source.settings)
        except FAILURES:
            raise TokenError(
                f"cannot use {source.place}: {source.credentials.kind} with a missing or wrong field", "file"
            ) from None
        own.refresh(request)
        now_s = source.now()
        # google-auth does not check whether it is a token, nor how long it is said to live.
        left_s = own.expiry.replace(tzinfo=UTC).timestamp() - datetime.now(UTC).timestamp()
        answer = {"access_token": own.token, "expires_in": left_s}
        return access_token(answer, f"what {request.http.answered} gave", now_s, now_s)


def _google_auth(credentials: Credentials, settings: TokenSettings) -> Any:
    """google-auth's own object for the credentials, good for access tokens."""
    info = credentials.info
    if credentials.kind == "service_account":
        from google.oauth2 import service_account

        return service_account.Credentials.from_service_account_info(info, scopes=[SCOPE])
    if credentials.kind == "authorized_user":
        from google.oauth2.credentials import Credentials as UserCredentials

        return UserCredentials(
            None,
            refresh_token=info["refresh_token"],
            token_uri=settings.oauth_url,
            client_id=info["client_id"],
            client_secret=info["client_secret"],
        )
    if credentials.kind == "external_account_authorized_user":
        from google.auth import external_account_authorized_user

        return external_account_authorized_user.Credentials.from_info(info)
    # The federated token itself is wanted, not an access token of the account that it leads to.
    federated = {name: value for name, value in info.items() if not name.startswith("service_account_imp")}
    if info["subject_token_type"] == "urn:ietf:params:aws:token-type:aws4_request":
        from google.auth import aws

        return aws.Credentials.from_info(federated, scopes=[SCOPE])
    source = info.get("credential_source")
    if isinstance(source, dict) and "executable" in source:
        from google.auth import pluggable

        return pluggable.Credentials.from_info(federated, scopes=[SCOPE])
    from google.auth import identity_pool

    return identity_pool.Credentials.from_info(federated, scopes=[SCOPE])
