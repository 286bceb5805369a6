"""What krun's own ends of the mesh's TLS prove, and whom they let in: the certificate files, the rules about
peers and the revocation lists, all followed.

1. New connections get the files as they are now; open ones keep what they were opened with. Files that cannot
   be used change nothing: the certificate in use stays, and the log says so once.
2. A peer that may not come in, or whose certificate is revoked, fails in the handshake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from OpenSSL import SSL

from shared.errors import RevokedError
from shared.net.legs.tls import TlsServerLeg
from shared.net.legs.tls_handshake import server_context
from shared.net.tls.certificate_files import LOOK_EVERY_S, CertificateFiles
from shared.net.tls.revocation_watch import LOOK_EVERY_S as LISTS_EVERY_S
from shared.net.tls.revocation_watch import RevocationWatch
from shared.net.tls.root_files import trust_bundles
from shared.trust.peer_policy import PeerPolicy
from shared.trust.revocations import Proof
from shared.trust.trust_bundles import TrustBundles

log = logging.getLogger("hbone.inbound")


class ServerTls:
    """The TLS of one end, whose `purpose` is the first word of what the log says of it."""

    def __init__(
        self,
        files: tuple[Path, Path, Path],
        bundles: Path | None,
        policy: PeerPolicy,
        *,
        purpose: str,
        crl: Path | None,
        alpn: Sequence[str],
        tls13_only: bool = False,
        no_common: Callable[[list[str]], None] = lambda offered: None,
        look_every_s: float = LOOK_EVERY_S,
        lists_every_s: float = LISTS_EVERY_S,
    ) -> None:
        """`files` are certificate chain, key and roots, `bundles` says which roots are whose, if it is there;
        `alpn`, `tls13_only` and `no_common` are `server_context`'s. `crl` has revocation lists; None: nobody
        is revoked."""
        self._policy = policy
        self._files = CertificateFiles(
            (*files[:2], *(() if bundles is None else (bundles,)), files[2]),
            lambda: server_context(
                *files, self._checks(bundles), alpn, tls13_only=tls13_only, no_common=no_common
            ),
            log=log,
            purpose=purpose,
            look_every_s=look_every_s,
        )
        self._revocations: RevocationWatch | None = None
        if crl is not None:
            self._revocations = RevocationWatch(crl, files[2], purpose=purpose, look_every_s=lists_every_s)

    def start(self, end_revoked: Callable[[], int]) -> None:
        """Reads the files, and follows them. `end_revoked` ends the connections of peers that are revoked by
        now, and says how many.

        Raises:
            UnavailableError: a file is missing.
            ConfigError: a file has not what it should.
        """
        self._files.read()
        if self._revocations is not None:
            self._revocations.read()
            self._revocations.follow(end_revoked)
            self._revocations.start()

    def close(self) -> None:
        """Follows the lists no more."""
        if self._revocations is not None:
            self._revocations.close()

    def context(self) -> SSL.Context:
        """For a connection that begins now."""
        return self._files.current(asyncio.get_running_loop().time())

    def prove(self, leg: TlsServerLeg) -> Proof:
        """What to remember of the client's chain, whose handshake is complete. Raises DeniedError if it has
        been revoked since it was let in."""
        return () if self._revocations is None else self._revocations.check(leg.proved_chain())

    def verdict(self, proof: Proof) -> RevokedError | None:
        """Why a peer of this proof may stay no longer; None: it may."""
        return None if self._revocations is None else self._revocations.verdict(proof)

    def _checks(self, file: Path | None) -> Callable[[list[bytes]], None]:
        bundles = TrustBundles() if file is None else trust_bundles(file)

        def check(chain: list[bytes]) -> None:
            self._policy.check(bundles.proved(chain))
            if self._revocations is not None:
                self._revocations.check(chain)

        return check
