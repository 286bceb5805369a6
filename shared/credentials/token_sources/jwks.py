"""The public keys of an issuer of JWTs (a JSON Web Key Set, RFC 7517), from a URL or a file, kept and
refreshed.

The rules:

1. Keys are fetched when a token first needs them, and count as long as the server said (Cache-Control:
   max-age, less Age, within MIN_AGE_S and MAX_AGE_S). A token that comes after AHEAD of that time has them
   fetched again in the background; one that comes after all of it waits, for its key may be withdrawn.
2. A token signed with a key that is not known has them fetched at once, for issuers rotate their keys; but
   not more often than every MIN_PACE_S, or anybody could make us ask with tokens of his own making.
3. One request is under way at most. When it fails, the old keys count on until they are STALE_S old: an
   issuer that withdraws a key must be heard at some time. Meanwhile nobody can say of an unknown key whether
   it is a new one, so its tokens are not called bad: there are no keys for them.
4. A file is read again when it has changed; when it cannot be read or used, the old keys stay.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jwt

from shared import regular_files
from shared.address import is_own_machine
from shared.errors import HboneError, UnavailableError, UpstreamError
from shared.net import http1
from shared.tasks import spawn
from shared.trust.jwt_check import PublicKey, algorithm
from shared.trust.token_claims import shown_claim
from shared.watched_file import WatchedFiles

log = logging.getLogger("hbone.jwks")

MAX_BYTES = 256 * 1024
"""Of a key set: Google's has 1.5 KiB, and a key of 4096 bits takes 1 KiB."""

MAX_KEYS = 64
"""Issuers have two to four at a time."""

TIMEOUT_S = 5.0
"""For one request, name lookup and TLS included."""

DEFAULT_AGE_S = 3600.0
"""Where the server does not say how long its answer may be kept."""

MIN_AGE_S = 60.0

MAX_AGE_S = 6 * 3600.0
"""What Google says of its own; a withdrawn key should not count for longer."""

AHEAD = 0.75
"""Of their age: from here on newer keys are fetched while the old ones serve."""

MIN_PACE_S = 10.0
"""Least time between two requests while there are keys."""

EMPTY_PACE_S = 1.0
"""The same while there are none, when every token has to wait for them."""

STALE_S = 24 * 3600.0
"""For so long keys count that could not be fetched again."""

LOOK_EVERY_S = 1.0
"""How often a file is looked at when tokens of known keys come."""

_MAX_AGE = re.compile(r"(?:^|[\s,])max-age\s*=\s*\"?([0-9]{1,9})", re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]{1,9}")


class KeySet:
    """The keys of one issuer, for a `TokenChecker` that has been given `keys`: `prepare` first, unless
    `is_ready`, then `check`. To be used on one event loop."""

    def __init__(
        self,
        source: str,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` is an `https` URL (`http` to an address of this machine only), or the path of a file.
        `tls` is asked for each request, and may raise UnavailableError; None means the system's trust. `now`
        gives seconds that only ever grow. Raises ValueError with the reason when `source` is a URL that
        cannot be used."""
        self.source = source
        self.keys: dict[str, PublicKey] = {}
        """By key id (`kid`), as `TokenChecker` expects them."""
        self.fetched_total = 0
        self.failed_total = 0
        self._tls = tls
        self._timeout_s = timeout_s
        self._now = now
        self._file = None if "://" in source else Path(source)
        if self._file is None:
            check_url(source)
        self._asked_at = float("-inf")
        self._got_at = float("-inf")
        self._age_s = DEFAULT_AGE_S
        self._watched = WatchedFiles([] if self._file is None else [self._file])
        self._failure: UnavailableError | None = None
        self._failed_at = float("-inf")
        self._flight: asyncio.Task[None] | None = None

    def is_ready(self, key_id: str | None) -> bool:
        """Whether a token signed with this key can be judged without waiting. Looks for newer keys in the
        background, where it is time."""
        is_known = key_id is None or key_id in self.keys
        if self._file is not None:
            self._check_file(at_once=not is_known)
            is_known = key_id is None or key_id in self.keys
            return bool(self.keys) and (is_known or self._failure is None)
        self._forget_stale()
        if not self.keys:
            return False
        age_s = self._now() - self._got_at
        if age_s >= AHEAD * self._age_s and self._may_ask:
            self._fly()
        if not is_known:
            return self._failure is None and not (self._flying or self._may_ask)
        return age_s < self._age_s or self._is_failing

    async def prepare(self, key_id: str | None) -> None:
        """Waits for the keys that a token signed with `key_id` asks for. Whether it is among them then, the
        check of the token tells.

        Raises UnavailableError when they cannot be had, saying why.
        """
        if self.is_ready(key_id):
            return
        if self._file is None and (self._flying or self._may_ask):
            # Shielded: a caller that gives up must not take the answer from the others.
            await asyncio.shield(self._fly())
        if self._failure is not None and (not self.keys or not (key_id is None or key_id in self.keys)):
            raise UnavailableError(str(self._failure)) from self._failure

    def close(self) -> None:
        """Ends a request that is under way; who waits for it is cancelled."""
        if self._flight is not None:
            self._flight.cancel()

    @property
    def _may_ask(self) -> bool:
        return self._now() - self._asked_at >= (MIN_PACE_S if self.keys else EMPTY_PACE_S)

    @property
    def _is_failing(self) -> bool:
        """Whether it has just been found out that there are no newer keys to be had."""
        return self._failure is not None and self._now() - self._failed_at < MIN_AGE_S

    @property
    def _flying(self) -> bool:
        return self._flight is not None and not self._flight.done()

    def _forget_stale(self) -> None:
        if self.keys and self._now() - self._got_at >= STALE_S:
            log.info("keys of %s: %g s old: no longer used", self.source, STALE_S)
            self.keys.clear()

    # From a URL.

    def _fly(self) -> asyncio.Task[None]:
        if self._flight is None or self._flight.done():
            self._asked_at = self._now()
            self._flight = spawn(self._fetch(), name=f"keys of {self.source}")
        return self._flight

    async def _fetch(self) -> None:
        try:
            answer = await http1.get(
                self.source,
                headers={"accept": "application/json"},
                timeout_s=self._timeout_s,
                max_bytes=MAX_BYTES,
                tls=self._tls() if self._tls is not None else None,
            )
            if answer.status != 200:
                raise UpstreamError(f"it answered {answer.status}")
            found = read_keys(answer.body)
        except (UpstreamError, UnavailableError, ValueError) as error:
            self._failed(error)
            return
        self._use(found)
        self._got_at = self._now()
        self._age_s = _lifetime(answer.headers)

    # From a file.

    def _check_file(self, *, at_once: bool) -> None:
        now = self._now()
        if now - self._asked_at < LOOK_EVERY_S and not at_once:
            return
        self._asked_at = now
        assert self._file is not None
        try:
            if not self._watched.changed():
                return
            self._watched.note()
            # In place: a local file of a few KiB.
            self._use(read_keys(regular_files.read(self._file, MAX_BYTES)))
        except OSError as error:
            self._watched.forget()
            self._failed(ValueError(error.strerror or str(error)))
        except ValueError as error:
            self._failed(error)

    def _use(self, found: dict[str, PublicKey]) -> None:
        self.fetched_total += 1
        self._failure = None
        if found.keys() != self.keys.keys():
            log.info("keys of %s: %s", self.source, " ".join(sorted(map(shown_claim, found))))
        # In place: checkers hold on to this very mapping.
        self.keys.clear()
        self.keys.update(found)

    def _failed(self, error: HboneError | ValueError) -> None:
        self.failed_total += 1
        self._failed_at = self._now()
        before, self._failure = self._failure, UnavailableError(f"no keys from {self.source}: {error}")
        if before is None or str(before) != str(self._failure):  # else it is known, and would fill the log
            log.warning("%s%s", self._failure, "; keeping those in use" if self.keys else "")


def key_id_of(authorization: str | None) -> str | None:
    """Which key the token says it is signed with; None when it does not say so, or is none."""
    token = (authorization or "").strip().partition(" ")[2].strip()
    try:
        key_id = jwt.get_unverified_header(token).get("kid")
    except (jwt.PyJWTError, RecursionError):
        return None
    return key_id if isinstance(key_id, str) else None


def _lifetime(headers: Mapping[str, str]) -> float:
    """For how many seconds an answer with these headers counts (RFC 9111 section 4.2)."""
    said = _MAX_AGE.search(headers.get("cache-control", ""))
    if said is None:
        return DEFAULT_AGE_S
    spent = _SECONDS.fullmatch(headers.get("age", "").strip())
    return min(max(float(said[1]) - (float(spent[0]) if spent else 0.0), MIN_AGE_S), MAX_AGE_S)


def read_keys(document: bytes) -> dict[str, PublicKey]:
    """The keys of a JSON Web Key Set that are there to check signatures as we do (RS256, ES256) and have an
    id; others are left out, as RFC 7517 section 5 wants it.

    Raises ValueError when there are none, too many, or it is no key set; its text has nothing of `document`.
    """
    import json

    try:
        found = json.loads(document)
        members = found["keys"]
        if not isinstance(members, list):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("no JSON Web Key Set") from None
    if len(members) > MAX_KEYS:
        raise ValueError(f"a JSON Web Key Set of more than {MAX_KEYS} keys")
    keys: dict[str, PublicKey] = {}
    for member in members:
        if not isinstance(member, dict) or not _is_for_checking(member):
            continue
        try:
            key = jwt.PyJWK.from_dict(member).key
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        own, key_id = algorithm(key), member.get("kid")
        if isinstance(key_id, str) and own is not None and member.get("alg", own) == own:
            keys[key_id] = key
    if not keys:
        raise ValueError("a JSON Web Key Set without a key for RS256 or ES256 that has an id")
    return keys


def _is_for_checking(member: dict[str, Any]) -> bool:
    """Whether the key is of a kind that we use, and for what (RFC 7517 sections 4.1 to 4.3)."""
    if member.get("kty") not in ("RSA", "EC") or member.get("use", "sig") != "sig":
        return False
    purposes = member.get("key_ops", ["verify"])
    return isinstance(purposes, list) and "verify" in purposes


def check_url(url: str) -> None:
    """Raises ValueError with the reason unless keys may be fetched from `url`: who can change them on their
    way decides who comes in, so only this machine is asked without TLS."""
    target = http1.Target.parse(url)
    if target.scheme != "https" and not is_own_machine(target.host):
        raise ValueError("keys are fetched with https only")
