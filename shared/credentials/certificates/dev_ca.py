"""The development CA as an authority that signs for us: no network, no proof, one folder for all.

The processes of one user share the folder, which the first of them makes. Whoever can write to the folder, or
read the key in it, can be anybody in its trust domain; so it has to be a `PrivateFolder`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from shared.credentials.certificates.authority import CA_CERTIFICATE_FILE, LEAF_LIFETIME_S, Authority
from shared.credentials.certificates.authority_client import to_pem
from shared.credentials.certificates.signing import Signed
from shared.errors import SigningError, UnavailableError
from shared.private_folder import PrivateFolder
from shared.trust.spiffe import SpiffeId

log = logging.getLogger("hbone.dev_ca")

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

    def check(self) -> None:
        """Raises UnavailableError where no attempt to sign could succeed: the folder cannot be used, or is of
        another trust domain. Makes it if it is missing; blocks as `open_authority`."""
        try:
            open_authority(self._folder, self._identity.trust_domain)
        except UnavailableError as error:
            raise UnavailableError(
                f"development CA: {error}; set HBONE_CA_FOLDER to another folder, or remove this one"
            ) from error

    async def sign(self, request_pem: bytes, lifetime_s: float = LEAF_LIFETIME_S) -> Signed:
        """As `signing.Signer.sign` has it."""
        try:
            # In a thread, for it may have to wait for another process.
            authority = await asyncio.to_thread(open_authority, self._folder, self._identity.trust_domain)
            certificate = authority.sign(request_pem, self._identity, lifetime_s=lifetime_s)
        except (ValueError, UnavailableError) as error:
            raise SigningError(f"{self.name}: {error}") from error
        return Signed(to_pem([certificate]), authority.root_pem)


def open_authority(path: Path, trust_domain: str) -> Authority:
    """The authority in the folder `path`, made there if it is missing, and anew if its root has ended.
    Processes that do this together get the same one.

    Blocks for LOCK_TIMEOUT_S at most while another one does it. Raises UnavailableError when the folder or
    what is in it cannot be used, is not ours alone, or is of another trust domain; ValueError when
    `trust_domain` is not a valid one.
    """
    with PrivateFolder(path) as folder:
        try:
            _lock(folder)
            if not folder.has(CA_CERTIFICATE_FILE):
                return _made(folder, trust_domain)
            authority = Authority.load(folder)
            if authority.trust_domain != trust_domain:
                raise UnavailableError(
                    f"{path} is of trust domain {authority.trust_domain}, not {trust_domain}"
                )
            if authority.root.not_valid_after_utc <= datetime.now(UTC):
                log.warning("the root in %s has ended: a new one is made, which others have to be told", path)
                return _made(folder, trust_domain)
        except OSError as error:
            raise UnavailableError(f"{path}: {error.strerror or error}") from error
        return authority


def _lock(folder: PrivateFolder) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{folder.path} is locked by another process") from error
            time.sleep(LOCK_PAUSE_S)
        else:
            return


def _made(folder: PrivateFolder, trust_domain: str) -> Authority:
    """Raises OSError."""
    authority = Authority.create(trust_domain)
    authority.save(folder)
    return authority
