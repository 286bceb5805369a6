"""What the clients of all authorities share: the token that proves us, the certificates of an answer, and
quotes of a server's text, which are short and without control characters and our own secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared.errors import HboneError, SigningError
from shared.trust import roots

TIMEOUT_S = 10.0
"""For all that one certificate takes, the token included: an authority answers within a second, and who asks
has an old certificate, or is not ready anyway."""

MAX_CERTIFICATES = 32
"""In a chain, or among the roots of an authority: both are of one to three, a few more while roots change."""

MAX_ANSWER_BYTES = 256 << 10
"""Of a whole answer: 64 certificates of 4 KiB."""

SHOWN_CHARS = 400
"""How much of a server's text is repeated: istiod tells of each way to authenticate in turn why it failed."""

READ_CHARS = 2000
"""How much of it is looked at."""

SECRET_CHARS = 12
"""A word that has so many characters in a row in common with a secret is not repeated: servers quote parts of
what they refuse."""


Token = Callable[[], Awaitable[str]]
"""Gives a bearer token that is valid now, or raises TokenError."""


async def bearer(token: Token, authority: str, timeout_s: float) -> str:
    """A token from `token`. Raises SigningError, which names `authority`, if there is none, or none within
    `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await token()
    except TimeoutError as error:
        raise SigningError(f"{authority}: no token for it within {timeout_s:g} s") from error
    except HboneError as error:
        raise SigningError(f"{authority}: no token for it: {error}") from error
    if not found:  # nobody is to be asked without a proof by accident
        raise SigningError(f"{authority}: no token for it: the one to be sent is empty")
    return found


def left(deadline: float) -> float:
    """Seconds until `deadline` (the loop's clock), to a tenth, for it is shown in errors; one tenth at least,
    so that it is whoever is asked next that is too late."""
    return max(round(deadline - asyncio.get_running_loop().time(), 1), 0.1)


def refused(authority: str, status: str, said: str, hint: str) -> SigningError:
    """The error for an authority that answered `status`, with what it said, which has been `quoted`."""
    text = f"{authority} refused: {status}" + (f": {said}" if said else "")
    return SigningError(f"{text}; {hint}" if hint else text)


def certificates(texts: Sequence[str], authority: str, what: str) -> list[x509.Certificate]:
    """The certificates in these PEM texts, in order; `what` says which they are ("its certificate chain").

    Raises SigningError, which names `authority`, if there are none, more than MAX_CERTIFICATES, or one cannot
    be read.
    """
    found: list[x509.Certificate] = []
    for text in texts:
        try:
            found += roots.parse(text.encode())
        except ValueError:
            # Without the original, and without what was there instead: it may be anything.
            raise SigningError(f"{authority}: {what} cannot be read: it is no certificate in PEM") from None
        if len(found) > MAX_CERTIFICATES:
            raise SigningError(f"{authority}: {what} has more than {MAX_CERTIFICATES} certificates")
    if not found:
        raise SigningError(f"{authority}: {what} is empty")
    return found


def to_pem(chain: Sequence[x509.Certificate]) -> bytes:
    """These certificates and nothing else, whatever stood between them."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain)


def quoted(text: str, secret: str = "") -> str:
    """`text` as one printable line of bounded length, without any part of `secret`."""
    words = ["[secret]" if secret and _shows(word, secret) else word for word in text[:READ_CHARS].split()]
    line = "".join(char if char.isprintable() else "?" for char in " ".join(words))
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}..."


def _shows(word: str, secret: str) -> bool:
    size = min(SECRET_CHARS, len(secret))
    return any(word[at : at + size] in secret for at in range(len(word) - size + 1))
