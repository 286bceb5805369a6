"""Keeps a workload's certificate current: asks an authority for it, checks the answer, renews it in time.

Listeners and clients know nothing of it: they read the files.

1. If the folder has a good certificate for the identity already, it is used, and its renewal planned.
2. Each renewal has a new key. Nothing is replaced before the answer was found good: a certificate for our key
   and our SPIFFE ID, valid now, whose chain leads to the roots.
3. While the authority is away, or its answer is no good, the old certificate stays, and the log says until
   when. When it ends, the log says so once, and the attempts go on.
4. The sources of roots are checked every LOOK_S; new roots are put beside the certificate at once.

Time is the wall clock's, checked every LOOK_S at least: so a container that was frozen for hours, or a clock
that was set, is noticed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from cryptography import x509

from shared import regular_files
from shared.credentials.certificates import certificate_writer
from shared.credentials.certificates.certificate_request import CertificateRequest, KeyKind, new_request
from shared.credentials.certificates.certificate_writer import Contents
from shared.credentials.certificates.renewal_schedule import RenewalRules
from shared.credentials.certificates.signing import Signed, Signer
from shared.errors import ConfigError, HboneError, SigningError, UnavailableError
from shared.net.tls import certificate_check, certificate_folder
from shared.net.tls.certificate_folder import CertificatePaths
from shared.net.tls.root_files import RootSources
from shared.tasks import spawn
from shared.trust import roots
from shared.trust.spiffe import SpiffeId

log = logging.getLogger("hbone.certificates")

LOOK_S = 60.0
"""Between two looks at the wall clock and at the roots' files: some stat calls and a small file."""


LAST_ATTEMPT_S = 1.0
"""The least that an authority has for its answer, when the time for the first certificate is nearly over."""


class Clock(Protocol):
    """Wall clock and waiting, so that tests can turn it."""

    def now(self) -> float:
        """Seconds since 1970."""

    async def wait(self, seconds: float) -> None:
        """Returns after about so long."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.time()

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What a keeper is told."""

    folder: Path
    """Where the files go; it has to be writable."""

    identity: SpiffeId
    """What is asked for."""

    roots: RootSources = field(default_factory=RootSources)
    """What chains have to lead to, beside the roots that the authority names itself."""

    lifetime_s: float = 24 * 3600
    """What is asked for; the authority decides. Istio gives a day."""

    key_kind: KeyKind = "ec"
    rules: RenewalRules = field(default_factory=RenewalRules)

    start_timeout_s: float = 30.0
    """For the first certificate, all attempts together: a CA's replica is replaced within seconds."""

    attempt_timeout_s: float = 20.0
    """For one answer, whatever the signer's own timeouts are."""

    look_s: float = LOOK_S
    owner: tuple[int, int] | None = None
    """User and group id for the files, None: ours."""


class CertificateKeeper:
    """Keeps one folder current, from `start` until `close`."""

    def __init__(
        self,
        settings: KeeperSettings,
        signer: Signer,
        *,
        clock: Clock | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance` gives random numbers in 0..1."""
        self.renewals = 0
        """Certificates that were had from the authority."""
        self.failures = 0
        """Attempts in a row that came to nothing."""
        self.valid_until_s: float | None = None
        """End of the certificate in use, seconds since 1970; None before there is one."""
        self._settings = settings
        self._signer = signer
        self._clock = clock or SystemClock()
        self._chance = chance
        self._due_s = 0.0
        self._told_expired = False
        self._signed_roots = b""  # that the authority named with its last answer
        self._roots_complaint = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def expired(self) -> bool:
        """Whether there was a certificate, and its end has passed."""
        return self.valid_until_s is not None and self._clock.now() >= self.valid_until_s

    async def start(self) -> None:
        """Returns once the folder has a good certificate, which is kept current from then on.

        Raises:
            SigningError: none was had in `start_timeout_s`.
            UnavailableError, ConfigError: the roots cannot be read, the folder cannot be written.
        """
        self._settings.roots.read()
        if not self._adopt():
            await self._first()
        self._task = spawn(self._keep(), name=f"keep certificate {self._settings.folder}")

    async def renew(self, timeout_s: float = math.inf) -> None:
        """Asks for a new certificate now and puts it in place. The answer has `attempt_timeout_s`, or
        `timeout_s` if that is less, in seconds.

        Raises SigningError, or UnavailableError or ConfigError as `start` does; then the old one stays.
        """
        settings = self._settings
        timeout_s = min(timeout_s, settings.attempt_timeout_s)
        # An RSA key takes 0.1 s and more, an EC key less than a thread.
        made = functools.partial(new_request, settings.identity, settings.key_kind)
        request = await asyncio.to_thread(made) if settings.key_kind == "rsa" else made()
        try:
            async with asyncio.timeout(timeout_s):
                signed = await self._signer.sign(request.request_pem, settings.lifetime_s)
        except TimeoutError:
            raise SigningError(f"{self._signer.name}: no answer in {timeout_s:.3g} s") from None
        leaf, trusted = self._check(request, signed)
        # Blocks for some small files, about a millisecond.
        bundles = settings.roots.read_bundles()
        self._write(Contents(signed.chain_pem, request.key_pem, trusted, bundles))
        self._signed_roots = signed.roots_pem
        self.renewals += 1
        self.failures = 0
        self._use(leaf, self._clock.now())
        log.info(
            "certificate %s from %s: valid until %s, serial %x",
            settings.identity,
            self._signer.name,
            certificate_check.shown(leaf.not_valid_after_utc),
            leaf.serial_number,
        )

    async def close(self) -> None:
        """Keeps it no longer; the files stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # The first one.

    def _adopt(self) -> bool:
        """Whether the folder has a good certificate already; then it is in use."""
        paths = certificate_folder.find(self._settings.folder)
        now_s = self._clock.now()
        found = certificate_check.read(paths, datetime.fromtimestamp(now_s, UTC))
        if not paths.count:
            return False
        if found.faults or found.chain_fault or found.identity != self._settings.identity:
            fault = next(iter(found.faults), "") or found.chain_fault or f"it is for {found.identity}"
            log.info("certificate in %s is not used: %s", self._settings.folder, fault)
            return False
        self._signed_roots = roots.to_pem(found.roots)
        leaf = found.chain[0]
        written = certificate_folder.written(self._settings.folder)
        if paths != written or not _belongs_to(written.private_key, self._settings.owner):
            # Under others' names: whoever follows those would see none of our renewals. Another owner is that
            # of an earlier krun.
            self._write(self._contents(paths, self._signed_roots, self._settings.roots.read_bundles()))
        self._use(leaf, leaf.not_valid_before_utc.timestamp())
        self._check_sources()
        log.info(
            "certificate %s found in %s: valid until %s",
            found.identity,
            self._settings.folder,
            certificate_check.shown(leaf.not_valid_after_utc),
        )
        return True

    async def _first(self) -> None:
        deadline_s = self._clock.now() + self._settings.start_timeout_s
        while True:
            try:
                # The last attempt has a second at least, and what is left of the time otherwise.
                return await self.renew(max(deadline_s - self._clock.now(), LAST_ATTEMPT_S))
            except SigningError as error:
                self.failures += 1
                pause_s = self._settings.rules.pause(self.failures, 0, self._chance())
                if self._clock.now() + pause_s >= deadline_s:
                    raise SigningError(
                        f"no certificate in {self._settings.start_timeout_s:g} s: {error}"
                    ) from error
                log.warning("no certificate yet, next attempt in %.1f s: %s", pause_s, error)
            await self._clock.wait(pause_s)

    def _use(self, leaf: x509.Certificate, start_s: float) -> None:
        self.valid_until_s = leaf.not_valid_after_utc.timestamp()
        self._told_expired = False
        self._due_s = self._settings.rules.due_at(start_s, self.valid_until_s, self._chance())
        # A certificate that has no life left to speak of is no reason to ask all the time.
        self._due_s = max(self._due_s, self._clock.now() + self._settings.rules.first_pause_s)

    # From then on.

    async def _keep(self) -> None:
        while True:
            while (left_s := self._due_s - self._clock.now()) > 0:
                await self._clock.wait(min(left_s, self._settings.look_s))
                self._check_sources()
            try:
                await self.renew()
            except HboneError as error:
                self._failed(error)

    def _failed(self, error: HboneError) -> None:
        assert self.valid_until_s is not None
        self.failures += 1
        now_s = self._clock.now()
        pause_s = self._settings.rules.pause(self.failures, self.valid_until_s - now_s, self._chance())
        self._due_s = now_s + pause_s
        until = certificate_check.shown(datetime.fromtimestamp(self.valid_until_s, UTC))
        state = f"expired at {until}" if self.expired else f"stays in use, valid until {until}"
        log.log(
            logging.ERROR if self.expired else logging.WARNING,
            "certificate not renewed, the one there is %s; next attempt in %.0f s: %s",
            state,
            pause_s,
            error,
        )

    def _check_sources(self) -> None:
        """What may have changed by itself: the certificate has come to its end, roots are others."""
        if self.expired and not self._told_expired:
            self._told_expired = True
            log.error("certificate %s has expired, peers refuse us", self._settings.identity)
        try:
            self._follow_roots()
            self._roots_complaint = ""
        except HboneError as error:
            if str(error) != self._roots_complaint:
                self._roots_complaint = str(error)
                log.warning("the roots in use stay: %s", error)

    def _follow_roots(self) -> None:
        """Puts the roots as they are now beside the certificate, if they are others."""
        trusted, bundles = self._trusted(self._signed_roots), self._settings.roots.read_bundles()
        paths = certificate_folder.find(self._settings.folder)
        try:
            if _content(paths.roots) == trusted and (not bundles or _is(paths.bundles, bundles)):
                return
            contents = self._contents(paths, trusted, bundles)
            chain = certificate_check.load_chain(contents.chain_pem)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"certificates in {self._settings.folder}: {error}") from error
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        fault = certificate_check.chain_fault(chain, certificate_check.load_roots(trusted), now)
        if fault and not self.expired:
            raise ConfigError("roots", None, "", f"our certificate leads to none of the new ones: {fault}")
        self._write(contents)
        log.info("roots in %s renewed", self._settings.folder)

    # Answers, and files.

    def _check(self, request: CertificateRequest, signed: Signed) -> tuple[x509.Certificate, bytes]:
        """The certificate of a good answer, and the roots to trust. Raises SigningError for any other."""
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        try:
            chain = certificate_check.load_chain(signed.chain_pem)
            trusted = self._trusted(signed.roots_pem)
            certificate_check.check_answer(
                chain, request.public_key_der, request.identity, certificate_check.load_roots(trusted), now
            )
        except certificate_check.OtherIdentityError as error:
            told = _disagreement(error.found, request.identity)
            raise SigningError(f"{self._signer.name}: {error}; {told}") from error
        except ValueError as error:
            raise SigningError(f"{self._signer.name}: {error}") from error
        return chain[0], trusted

    def _trusted(self, signed_roots: bytes) -> bytes:
        """Our roots and those that the authority named. Raises SigningError when there are none."""
        try:
            trusted = roots.merge(self._settings.roots.read(), signed_roots)
        except ValueError as error:
            raise SigningError(f"{self._signer.name}: the roots that it named: {error}") from error
        if not trusted:
            raise SigningError(f"{self._signer.name}: it names no roots, and none are set")
        return trusted

    def _contents(self, paths: CertificatePaths, trusted: bytes, bundles: bytes) -> Contents:
        """Chain and key of `paths` beside other roots. Raises UnavailableError."""
        try:
            chain, key = _content(paths.certificates), _content(paths.private_key)
            return Contents(chain, key, trusted, bundles)
        except OSError as error:
            raise UnavailableError(f"certificates in {self._settings.folder}: {error}") from error

    def _write(self, contents: Contents) -> None:
        try:
            certificate_writer.write(self._settings.folder, contents, self._settings.owner)
        except OSError as error:
            folder = self._settings.folder
            raise UnavailableError(
                f"certificates: {folder} cannot be written: {error.strerror or error}"
            ) from error


def _disagreement(found: SpiffeId, wanted: SpiffeId) -> str:
    """Which settings say something else than the authority, which goes by the token that it was shown."""
    parts = (
        ("TRUST_DOMAIN", wanted.trust_domain, found.trust_domain),
        ("WORKLOAD_NAMESPACE", wanted.namespace, found.namespace),
        ("WORKLOAD_SERVICE_ACCOUNT", wanted.service_account, found.service_account),
    )
    others = [f"{name} is {ours or 'none'}" for name, ours, theirs in parts if ours != theirs]
    return f"the authority goes by the token, and {' and '.join(others) or 'its name is of another form'}"


def _belongs_to(file: Path, owner: tuple[int, int] | None) -> bool:
    if owner is None:
        return True
    told = file.stat()
    return (told.st_uid, told.st_gid) == owner


def _content(file: Path) -> bytes:
    return regular_files.read(file, roots.MAX_BYTES)


def _is(file: Path, content: bytes) -> bool:
    try:
        return _content(file) == content
    except FileNotFoundError:
        return False
