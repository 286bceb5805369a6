"""A file of certificate revocation lists, followed: new connections are checked against it, and open ones
end.

The file, and the roots that have to have signed it, are checked by a timer, a stat call each, because an open
connection has to end although no new one comes. Reading happens in a thread. When a new file cannot be used,
the lists in use stay. A list that is overdue stays in use, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shared import regular_files
from shared.errors import ConfigError, HboneError, RevokedError, UnavailableError
from shared.ops import families as metrics
from shared.tasks import spawn
from shared.trust.revocation_lists import MAX_FILE_BYTES, RevocationList, parse
from shared.trust.revocations import Proof, Revocations
from shared.watched_file import WatchedFiles

if TYPE_CHECKING:
    from cryptography import x509
    from prometheus_client import Metric

log = logging.getLogger("hbone.revocations")

LOOK_EVERY_S = 2.0
"""Between two checks of the files: a check costs microseconds, and whoever distributes the file takes far
longer."""

_Read = tuple[tuple[RevocationList, ...], list["x509.Certificate"]]


class RevocationWatch:
    """The lists of one file. `read` comes first, then `start`, `close` at the end."""

    def __init__(
        self,
        file: Path,
        roots: Path,
        *,
        purpose: str,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`roots` is the PEM file of the roots that peers have to lead to. `purpose` is whose peers they are,
        for the log; `clock` tells seconds since the epoch."""
        self.file = file
        self.rejected = 0
        """Peers that were refused as revoked."""
        self.ended = 0
        """Open connections that were ended."""
        self.failed = 0
        """Times that a new file could not be used."""
        self._roots = roots
        self._purpose = purpose
        self._every_s = look_every_s
        self._clock = clock
        self._revocations = Revocations()
        self._watched = WatchedFiles((file, roots))
        self._complaint = ""  # about the files as they are now, once told
        self._overdue: set[str] = set()  # issuers, once told
        self._followers: list[Callable[[], int]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_followed(self) -> bool:
        """Between `start` and `close`."""
        return self._task is not None

    @property
    def next_update(self) -> float:
        """When the first list is overdue, seconds since the epoch; 0: no list says."""
        due = [one.next_update.timestamp() for one in self._revocations.lists if one.next_update is not None]
        return min(due, default=0.0)

    @property
    def pem(self) -> str:
        """The lists in use, for others to use."""
        from cryptography.hazmat.primitives.serialization import Encoding

        lists = self._revocations.lists
        return b"".join(one.crl.public_bytes(Encoding.PEM) for one in lists).decode("ascii")

    @property
    def uncovered(self) -> list[str]:
        """Names of roots that have no list here."""
        return self._revocations.uncovered

    def follow(self, end_revoked: Callable[[], int]) -> None:
        """`end_revoked` is called when others are revoked than before: it ends their connections, and says
        how many."""
        self._followers.append(end_revoked)

    # Peers.

    def check(self, chain: Sequence[bytes]) -> Proof:
        """What to remember of a peer's verified `chain` in DER, its leaf first; of a leaf alone, as resumed
        sessions have it, what is known of its issuers. Raises RevokedError, and counts it, or DeniedError."""
        if len(chain) == 1:
            chain = self._revocations.complete(chain[0])
        try:
            return self._revocations.check(chain)
        except RevokedError:
            self.rejected += 1
            raise

    def verdict(self, proof: Proof) -> RevokedError | None:
        """Why a peer that was let in is revoked by now; None if it is not."""
        try:
            self._revocations.look_up(proof)
        except RevokedError as error:
            return error
        return None

    # The file.

    def read(self) -> None:
        """Reads the file.

        Raises:
            UnavailableError: a file is missing or cannot be read.
            ConfigError: there is no list in it that can be used, or one that its issuer has not signed.
        """
        self._watched.note()
        self._use(*_read(self.file, self._roots, ()))

    def start(self) -> None:
        """From now on follows the file."""
        if self._task is None:
            self._task = spawn(self._watch(), name=f"watch {self.file}")

    def close(self) -> None:
        """Follows it no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def check_files(self) -> None:
        """Reads the files again if they have changed, and ends connections of those who are revoked now. What
        cannot be used changes nothing but the log."""
        if self._watched.changed():
            self._watched.note()
            try:
                known = self._revocations.intermediates
                self._use(*await asyncio.to_thread(_read, self.file, self._roots, known))
            except HboneError as error:
                if isinstance(error, UnavailableError):
                    self._watched.forget()  # read once more at the next check: it may pass without a change
                self._complain(str(error))
            else:
                self._complaint = ""
                count = sum(end_revoked() for end_revoked in list(self._followers))
                self.ended += count
                log.info("%s: revocation lists read again: %d open connections ended", self._purpose, count)
        self._tell_overdue()

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            self.failed += 1
            log.warning("%s: keeping the revocation lists in use: %s", self._purpose, text)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.check_files()

    def _use(self, lists: Iterable[RevocationList], roots: Iterable[x509.Certificate]) -> None:
        try:
            self._revocations.use(lists, roots)
        except ValueError as error:
            raise ConfigError(str(self.file), None, "", str(error)) from error
        self._overdue.clear()
        self._tell_overdue()

    def _tell_overdue(self) -> None:
        from shared.net.tls.certificate_check import shown

        now = self._clock()
        for one in self._revocations.lists:
            due, key = one.next_update, one.issuer
            if due is not None and due.timestamp() < now and key not in self._overdue:
                self._overdue.add(key)
                log.warning(
                    "%s: the revocation list of %s in %s was to be replaced by %s; it stays in use",
                    self._purpose,
                    one.issuer,
                    self.file,
                    shown(due),
                )


def _read(file: Path, roots: Path, intermediates: Iterable[x509.Certificate]) -> _Read:
    """Lists and roots, and the lists know which of `intermediates` and roots have signed them. Raises as
    `RevocationWatch.read`."""
    from shared.trust import roots as root_certificates

    try:
        lists = parse(regular_files.read_needed(file, MAX_FILE_BYTES))
    except ValueError as error:
        raise ConfigError(str(file), None, "", f"no usable revocation lists: {error}") from error
    try:
        trusted = root_certificates.parse(regular_files.read_needed(roots, MAX_FILE_BYTES))
        for issuer in (*trusted, *intermediates):
            for one in lists:
                if one.issuer_name == issuer.subject:
                    one.signed_by(issuer)
        return lists, trusted
    except ValueError as error:
        raise ConfigError(str(roots), None, "", f"no usable root certificates: {error}") from error


class Counted(Protocol):
    """What has counts like a `RevocationWatch`."""

    rejected: int
    ended: int
    failed: int

    @property
    def next_update(self) -> float: ...


class PastLists:
    """The counts of lists that nobody follows any more: counters never go back."""

    def __init__(self) -> None:
        self.rejected = self.ended = self.failed = 0

    @property
    def next_update(self) -> float:
        """None is to come."""
        return 0.0

    def add(self, watch: RevocationWatch) -> None:
        """Takes over the counts of `watch`, which is closed."""
        self.rejected += watch.rejected
        self.ended += watch.ended
        self.failed += watch.failed


def families(watches: Iterable[tuple[str, str, Counted]]) -> Iterator[Metric]:
    """The metrics of `watches`, each with Istio's word for our end (`source`, `destination`) and its place.

    `istio_crl_policy_rejections` has ztunnel's name.
    """
    rejected: dict[str, int] = {}
    ended: dict[str, int] = {}
    failed: dict[str, int] = {}
    due: dict[str, float] = {}
    for reporter, place, watch in watches:
        rejected[reporter] = rejected.get(reporter, 0) + watch.rejected
        ended[place] = ended.get(place, 0) + watch.ended
        failed[place] = failed.get(place, 0) + watch.failed
        if watch.next_update:
            due[place] = min(due.get(place, watch.next_update), watch.next_update)
    yield metrics.CRL_REJECTIONS.metric(rejected.items())
    yield metrics.CRL_CONNECTIONS_ENDED.metric(ended.items())
    yield metrics.CRL_READ_FAILURES.metric(failed.items())
    yield metrics.CRL_NEXT_UPDATE.metric(due.items())
