"""Who this workload is, as its certificate says: for the rules that mean "our own trust domain"."""

from __future__ import annotations

import ssl
from pathlib import Path

from shared import regular_files
from shared.errors import UnavailableError
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SCHEME, SpiffeId, peer_id


def own_identity(certificates: Path) -> SpiffeId:
    """The SPIFFE ID of the certificate in the folder `certificates`.

    Raises:
        UnavailableError: there is none that can be read.
        DeniedError: it names no workload.
    """
    file = certificate_folder.find(certificates).certificates
    try:
        content = regular_files.read(file, regular_files.MAX_PEM_BYTES)
        own = content.decode("ascii").partition(ssl.PEM_FOOTER)[0]
        der = ssl.PEM_cert_to_DER_cert(f"{own[own.index(ssl.PEM_HEADER) :]}{ssl.PEM_FOOTER}\n")
    except (OSError, ValueError) as error:
        raise UnavailableError(f"certificate {file}: cannot be read: {error}") from error
    return peer_id(der)


def own_trust_domain(certificates: Path) -> tuple[str, ...]:
    """The pattern that matches everybody of our trust domain. Raises what `own_identity` does."""
    return (f"{SCHEME}{own_identity(certificates).trust_domain}/**",)
