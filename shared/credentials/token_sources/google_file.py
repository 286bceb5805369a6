"""The file with Google's credentials: where it may be (application default credentials, AIP-4110), what
kind it is, the fields that each kind needs, and which account it leads to.

Its content is a secret: no text here has any of it but the kind, e-mail addresses and hosts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared import regular_files
from shared.credentials.token_sources.token_settings import TokenSettings, is_there
from shared.errors import TokenError
from shared.trust.token_claims import shown_claim

MAX_FILE_BYTES = 64 * 1024
"""A key's file has 2.5 KiB, a configuration of federation less."""

NEEDED: dict[str, tuple[str, ...]] = {
    "service_account": ("client_email", "private_key", "token_uri"),
    "impersonated_service_account": ("service_account_impersonation_url",),
    "external_account": ("audience", "subject_token_type", "token_url"),
    "authorized_user": ("client_id", "client_secret", "refresh_token"),
    "external_account_authorized_user": ("token_url", "client_id", "client_secret", "refresh_token"),
}
"""The kinds that are taken, by the file's `type`, and the texts that each has to have."""

SOURCES = ("file", "url", "executable", "environment_id")
"""Where a federation may have its subject token; the last is AWS'. Not `certificate`: that is mTLS."""

# What google-auth writes into such files, and gcloud: https://iamcredentials.googleapis.com/v1/projects/-/...
_IMPERSONATION = re.compile(
    r"(?P<base>https?://[^/?#\s]+/v1/projects/[^/?#\s]+/serviceAccounts/(?P<account>[^/?#:\s{}]+))"
    r":generateAccessToken"
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of one kind, as a file or a part of one has them."""

    kind: str
    info: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Impersonation:
    """Whom the credentials in a file speak for, beyond themselves."""

    account: str
    id_token_url: str
    delegates: tuple[str, ...]


def find(settings: TokenSettings) -> Path:
    """Where the file is: GOOGLE_APPLICATION_CREDENTIALS, or gcloud's. Raises TokenError when neither is."""
    if settings.credentials is not None:
        return settings.credentials
    if settings.gcloud is not None and is_there(settings.gcloud):
        return settings.gcloud
    looked = f", and there is no {settings.gcloud}" if settings.gcloud else ""
    raise TokenError(f"no Google credentials: GOOGLE_APPLICATION_CREDENTIALS is not set{looked}")


def read(path: Path) -> Credentials:
    """The credentials in a file. Raises TokenError, which says what is wrong and quotes nothing."""
    try:
        content = regular_files.read(path, MAX_FILE_BYTES)
    except OSError as error:
        raise TokenError(f"cannot read credentials file {path}: {error.strerror or error}", "file") from error
    try:
        info = json.loads(content)
    except (ValueError, RecursionError):
        # Without the original: it holds the text that could not be read.
        raise TokenError(f"cannot use credentials file {path}: it is no JSON", "file") from None
    return judged(info, f"credentials file {path}")


def judged(info: object, place: str) -> Credentials:
    """`info` as credentials, once it has all that its kind needs. Raises TokenError."""
    if not isinstance(info, dict):
        raise TokenError(f"cannot use {place}: it is no JSON object", "file")
    kind = info.get("type")
    if not isinstance(kind, str) or kind not in NEEDED:
        known = isinstance(kind, str) and re.fullmatch(r"[a-z_]{1,40}", kind)
        raise TokenError(
            f"cannot use {place}: its type is {kind if known else 'none'}, not one of {', '.join(NEEDED)}",
            "file",
        )
    for name in NEEDED[kind]:
        if not isinstance(info.get(name), str) or not info[name]:
            raise TokenError(f"cannot use {place}: {kind} without a text {name}", "file")
    if kind == "external_account":
        _check_source(info.get("credential_source"), f"credential_source of {place}")
    return Credentials(kind, info)


def _check_source(source: object, place: str) -> None:
    """Every value has to be a text: google-auth would open a number as one of our file descriptors, read it
    and close it."""
    if not isinstance(source, dict) or not any(isinstance(source.get(name), (str, dict)) for name in SOURCES):
        raise TokenError(f"cannot use {place}: it has none of {', '.join(SOURCES)}", "file")
    for name, value in source.items():
        parts = value if isinstance(value, dict) else {name: value}
        for part, text in parts.items():
            number = part.endswith("timeout_millis") and isinstance(text, int)
            if not (number or isinstance(text, str)):
                raise TokenError(
                    f"cannot use {place}: a value that is no text in {shown_claim(name)}", "file"
                )


def impersonation(credentials: Credentials, place: str) -> Impersonation | None:
    """Whom `service_account_impersonation_url` names; None without one. Raises TokenError when it is none."""
    url = credentials.info.get("service_account_impersonation_url")
    if not url:
        return None
    match = _IMPERSONATION.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        raise TokenError(
            f"cannot use {place}: its service_account_impersonation_url is not "
            "https://HOST/v1/projects/-/serviceAccounts/ACCOUNT:generateAccessToken",
            "file",
        )
    delegates = credentials.info.get("delegates") or []
    if not isinstance(delegates, list) or not all(isinstance(name, str) for name in delegates):
        raise TokenError(f"cannot use {place}: its delegates are no list of names", "file")
    return Impersonation(match["account"], f"{match['base']}:generateIdToken", tuple(delegates))


def subject_source(credentials: Credentials) -> str:
    """Where an `external_account` has its subject token from, for error texts."""
    source = credentials.info.get("credential_source")
    if isinstance(source, dict):
        if isinstance(source.get("file"), str):
            return f"no subject token could be read from {source['file']}"
        if "executable" in source:
            return (
                "its executable gave no subject token; it is only run with "
                "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1"
            )
    return "its credential_source is none that google-auth can use"
