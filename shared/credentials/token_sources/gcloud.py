"""Tokens of the gcloud command's login, and what its configuration says: account, project and region.

The command is asked, not its files of logins, whose form is gcloud's own. It takes a second, so callers keep
what it gives. Its ID tokens:

- of a service account that it is logged in as, or impersonates (HBONE_TOKEN_ACCOUNT): for any audience;
- of a person: for gcloud's own client only. Cloud Run accepts them for every service that the person may call
  ("Authenticating developers"), so whoever gets one can use it there for an hour.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shared import regular_files
from shared.credentials.token_sources.access_tokens import KeptAccessToken
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.programs import TIMEOUT_S, output_of
from shared.credentials.tokens.tokens import demand_sendable
from shared.errors import OwnClientError, TokenError
from shared.trust.token_claims import claims_of, expiry_of

COMMAND = "gcloud"

CLIENT = "32555940559.apps.googleusercontent.com"
"""gcloud's OAuth client, the audience of a person's ID tokens."""

SERVICE_ACCOUNTS = ".gserviceaccount.com"
"""The end of a service account's e-mail address."""

ACCESS_S = 300.0
"""How long an access token of gcloud's is used: it does not say when that ends, but renews those that end
within five minutes (gcloud's own bound)."""

MAX_CONFIG_BYTES = 64 * 1024

QUIET = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_CORE_SURVEY_PROMPTS": "0"}
"""Nobody is there to be asked, nor to be told of a survey."""


def told(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """All that gcloud can be told by variables. Any property may be one, and several say whose login it
    uses: CLOUDSDK_CORE_ACCOUNT, CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT and others."""
    return sorted(item for item in environ.items() if item[0].startswith("CLOUDSDK_"))


def find(environ: Mapping[str, str]) -> str:
    """The path of the command; empty if there is none in PATH."""
    from shutil import which

    return which(COMMAND, path=environ.get("PATH", os.defpath)) or ""


class GcloudConfig:
    """What gcloud's active configuration says; variables go over its file, as they do for gcloud."""

    def __init__(self, environ: Mapping[str, str], settings: TokenSettings) -> None:
        self._environ = environ
        self._folder = settings.gcloud.parent if settings.gcloud is not None else None
        self._values: Mapping[str, Mapping[str, str]] | None = None

    @property
    def account(self) -> str:
        """The e-mail address of the login, empty if it is not known."""
        return self._value("core", "account")

    @property
    def project(self) -> str:
        """The project's name, empty if none is set."""
        return self._value("core", "project")

    @property
    def region(self) -> str:
        """Cloud Run's region, empty if none is set."""
        return self._value("run", "region")

    def files(self) -> list[Path]:
        """The files that this comes from: what is kept is worth nothing when they have changed."""
        if self._folder is None:
            return []
        return [self._folder / "active_config", self._folder / "configurations" / f"config_{self._name()}"]

    def _value(self, section: str, name: str) -> str:
        variable = f"CLOUDSDK_{section}_{name}".upper()
        if told := self._environ.get(variable, "").strip():
            return told
        if self._values is None:
            self._values = self._read()
        return self._values.get(section, {}).get(name, "").strip()

    def _name(self) -> str:
        if told := self._environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME", "").strip():
            return told
        assert self._folder is not None
        try:
            content = regular_files.read(self._folder / "active_config", MAX_CONFIG_BYTES)
        except OSError:
            return "default"
        return content.decode("utf-8", "replace").strip() or "default"

    def _read(self) -> Mapping[str, Mapping[str, str]]:
        """The sections of the active configuration; none if it cannot be read, for gcloud will say why."""
        import configparser

        if self._folder is None:
            return {}
        parser = configparser.ConfigParser(interpolation=None)
        try:
            content = regular_files.read(self.files()[1], MAX_CONFIG_BYTES)
            parser.read_string(content.decode())
        except (OSError, ValueError, configparser.Error):
            return {}
        return {section: dict(parser[section]) for section in parser.sections()}


class GcloudMinter:
    """ID tokens by the gcloud command."""

    def __init__(
        self,
        program: str,
        settings: TokenSettings,
        config: GcloudConfig,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`program` is the path of the command, `timeout_s` bounds one run of it."""
        self._program = program
        self._service_account = settings.service_account
        self._config = config
        self._timeout_s = timeout_s

    @property
    def identity(self) -> str:
        if self._service_account:
            return f"{self._service_account} by gcloud"
        return f"gcloud's {self._config.account}" if self._config.account else "gcloud's login"

    async def mint(self, audience: str) -> Minted:
        """A new ID token. Raises TokenError; OwnClientError where a person's login cannot give it."""
        account = self._service_account
        flags = [f"--audiences={audience}"]
        if account:
            flags += [f"--impersonate-service-account={account}", "--include-email"]
        elif not self._config.account.endswith(SERVICE_ACCOUNTS):
            if audience != CLIENT:
                raise OwnClientError(
                    f"no ID token for {audience} with {self.identity}: a person's login gives one for its "
                    "own client only; set HBONE_TOKEN_ACCOUNT to a service account to impersonate",
                    CLIENT,
                )
            flags = []
        token = await _printed(self._program, "print-identity-token", flags, self._timeout_s)
        try:
            return Minted(token, expiry_of(claims_of(token)))
        except ValueError as error:
            raise TokenError(f"no token from {self.identity}: what it gave is {error}", "garbled") from error


class GcloudAccess(KeptAccessToken):
    """Access tokens by the gcloud command."""

    def __init__(
        self,
        program: str,
        config: GcloudConfig,
        *,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """As GcloudMinter; `now` gives seconds since 1970."""
        self._program = program
        self._timeout_s = timeout_s
        super().__init__(f"gcloud's {config.account or 'login'}", self._asked, now=now)

    async def _asked(self) -> Minted:
        token = await _printed(self._program, "print-access-token", [], self._timeout_s)
        return Minted(token, self._now() + ACCESS_S)


async def _printed(program: str, what: str, flags: list[str], timeout_s: float) -> str:
    """The token that `gcloud auth WHAT` prints. Raises TokenError."""
    name = f"gcloud auth {what}"
    output = await output_of([program, "auth", what, "--quiet", *flags], QUIET, name, timeout_s=timeout_s)
    token = output.strip().decode("latin-1")
    try:
        demand_sendable(token)
    except TokenError as error:
        raise TokenError(f"cannot use what {name} printed: {error}", error.reason) from error
    return token
