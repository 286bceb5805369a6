"""The development CA as an authority that signs for us: no network, no proof, one folder for all.

Owned here: the folder that several processes of a demo share, made by whichever comes first, and the contract
of `signing` over it. Whoever can read the folder can be anybody in its trust domain. Counterpart:
`authority`, which has the key.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from shared.errors import SigningError, UnavailableError
from shared.identity.certificates.authority import CA_CERTIFICATE_FILE, LEAF_LIFETIME_S, Authority
from shared.identity.certificates.authority_client import to_pem
from shared.identity.signing import Signed
from shared.identity.spiffe import SpiffeId

log = logging.getLogger("hbone.dev_ca")

FOLDER_MODE = 0o700
"""Of a folder that we make: the key in it is worth as much as all that it signs."""

LOCK_TIMEOUT_S = 2.0
"""Until another process has let go of the folder, which takes it a millisecond; one that was stopped never
does."""

LOCK_PAUSE_S = 0.01


class DevCa:
    """The authority in a folder as a `Signer` for one identity."""

    def __init__(self, folder: Path, identity: SpiffeId) -> None:
        """Certificates are for `identity` only; its trust domain is the authority's."""
        self._folder = folder
        self._identity = identity

    @property
    def name(self) -> str:
        return f"development CA in {self._folder}"

    async def sign(self, request_pem: bytes, lifetime_s: float = LEAF_LIFETIME_S) -> Signed:
        """As `signing.Signer.sign` has it."""
        try:
            # In a thread, for it may have to wait for another process.
            authority = await asyncio.to_thread(open_authority, self._folder, self._identity.trust_domain)
            certificate = authority.sign(request_pem, self._identity, lifetime_s=lifetime_s)
        except (ValueError, UnavailableError) as error:
            raise SigningError(f"{self.name}: {error}") from error
        return Signed(to_pem([certificate]), authority.root_pem)


def open_authority(folder: Path, trust_domain: str) -> Authority:
    """The authority in `folder`, made there if it is missing, and anew if its root has ended. Processes that
    do this together get the same one.

    Blocks for LOCK_TIMEOUT_S at most while another one does it. Raises UnavailableError when the folder or
    what is in it cannot be used, or it is of another trust domain; ValueError when `trust_domain` is not a
    valid one.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UnavailableError(f"authority: {folder}: {error.strerror or error}") from error
    try:
        _take(lock, folder)
        if not (folder / CA_CERTIFICATE_FILE).exists():
            return _made(folder, trust_domain)
        authority = Authority.load(folder)
        if authority.trust_domain != trust_domain:
            raise UnavailableError(
                f"authority: {folder} is of trust domain {authority.trust_domain}, not {trust_domain}"
            )
        if authority.root.not_valid_after_utc <= datetime.now(UTC):
            log.warning("the root in %s has ended: a new one is made, which others have to be told", folder)
            return _made(folder, trust_domain)
        return authority
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise UnavailableError(f"authority: {folder} is locked by another process") from error
            time.sleep(LOCK_PAUSE_S)
        else:
            return


def _made(folder: Path, trust_domain: str) -> Authority:
    authority = Authority.create(trust_domain)
    try:
        authority.save(folder)
    except OSError as error:
        raise UnavailableError(f"authority: {folder}: {error.strerror or error}") from error
    return authority
