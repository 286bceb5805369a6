"""Public keys as `authorized_keys` has them: options, type, key and comment of each line (sshd(8),
AUTHORIZED_KEYS FILE FORMAT), and what the bytes of a key or a certificate say (RFC 4253 section 6.6; OpenSSH,
PROTOCOL.certkeys)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass

MAX_LINE_CHARS = 16 * 1024
"""Of a line, as in sshd; a key of RSA with 16,384 bits takes 2,900."""

MAX_KEYS = 1000
"""Lines of one source."""

CERTIFICATE = "-cert-v01@openssh.com"
"""How the types of certificates end."""

TYPES = frozenset(
    {
        "ssh-ed25519",
        "ssh-rsa",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "sk-ssh-ed25519@openssh.com",
        "sk-ecdsa-sha2-nistp256@openssh.com",
    }
)
"""Of keys. DSA is not among them: OpenSSH has given it up."""

AUTHORITY = "cert-authority"
"""The option of a key that signs the certificates of users."""

# Fields of a certificate behind its type and nonce, which belong to the key in it.
_KEY_FIELDS = {
    "ssh-ed25519": 1,
    "ssh-rsa": 2,
    "ecdsa-sha2-nistp256": 2,
    "ecdsa-sha2-nistp384": 2,
    "ecdsa-sha2-nistp521": 2,
    "sk-ssh-ed25519@openssh.com": 2,
    "sk-ecdsa-sha2-nistp256@openssh.com": 3,
}


@dataclass(frozen=True, slots=True)
class AuthorizedKey:
    """One line."""

    options: tuple[tuple[str, str | None], ...]
    """By name in lower case, in their order; None: an option without a value."""

    kind: str
    """One of TYPES."""

    blob: bytes
    comment: str

    @property
    def is_authority(self) -> bool:
        """Whether it is no user's key, but signs certificates of users."""
        return self.has(AUTHORITY)

    @property
    def fingerprint(self) -> str:
        """As ssh-keygen -l prints it."""
        return fingerprint(self.blob)

    def has(self, option: str) -> bool:
        """Whether it has the option."""
        return any(name == option for name, _ in self.options)

    def line(self) -> str:
        """The line again, options with values in quotes."""
        told = ",".join(name if value is None else f"{name}={_quoted(value)}" for name, value in self.options)
        words = [told, self.kind, base64.b64encode(self.blob).decode(), self.comment]
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Presented:
    """What a client shows: a key, or a certificate for one."""

    key_fingerprint: str
    """Of the key, also in a certificate."""

    identity: str = ""
    """A certificate's key id."""

    serial: int = 0
    principals: tuple[str, ...] = ()
    authority: str = ""
    """The fingerprint of the key that has signed it; empty: it is no certificate."""

    @property
    def is_certificate(self) -> bool:
        """Whether somebody has signed it."""
        return bool(self.authority)


def parse_lines(text: str) -> tuple[AuthorizedKey, ...]:
    """The keys in `text`, one a line; empty lines and those that begin with # are none. Raises ValueError
    with the number of the line that is wrong, and if there is no key."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            found.append(parse(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if len(found) > MAX_KEYS:
            raise ValueError(f"more than {MAX_KEYS} keys")
    if not found:
        raise ValueError("no public key")
    return tuple(found)


def parse(line: str) -> AuthorizedKey:
    """The key in a line. Raises ValueError."""
    if len(line) > MAX_LINE_CHARS:
        raise ValueError(f"longer than {MAX_LINE_CHARS} characters")
    if not line.isprintable():  # a tab is not, and nobody writes one here
        line = line.replace("\t", " ")
        if not line.isprintable():
            raise ValueError("has characters that cannot be printed")
    if "PRIVATE KEY" in line:
        raise ValueError("a private key, where a public one has to be")
    first, _, rest = line.partition(" ")
    options: tuple[tuple[str, str | None], ...] = ()
    if first not in TYPES and not first.endswith(CERTIFICATE):
        options, line = _options(line)
        first, _, rest = line.partition(" ")
    if first not in TYPES:
        raise ValueError("no public key of a type that is known, such as ssh-ed25519")
    encoded, _, comment = rest.strip().partition(" ")
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the key is no base64") from None
    if not encoded or _Reader(blob).text() != first:
        raise ValueError("the key is not of the type that the line says")
    return AuthorizedKey(options, first, blob, comment.strip())


def presented(blob: bytes) -> Presented:
    """What a client's key or certificate says; nothing of it is proved. Raises ValueError if it is
    malformed."""
    reader = _Reader(blob)
    kind = reader.text()
    if not kind.endswith(CERTIFICATE):
        return Presented(fingerprint(blob))
    plain = kind.removesuffix(CERTIFICATE)
    # A security key's certificate has its type with the domain in the middle.
    plain = f"{plain}@openssh.com" if plain.startswith("sk-") else plain
    if plain not in _KEY_FIELDS:
        raise ValueError("a certificate of a type that is not known")
    reader.string()  # the nonce
    fields = [reader.string() for _ in range(_KEY_FIELDS[plain])]
    key = b"".join(map(_string, (plain.encode(), *fields)))
    serial = reader.number(8)
    reader.number(4)  # user or host
    identity = reader.text()
    names, principals = _Reader(reader.string()), []
    while names.left:
        principals.append(names.text())
    reader.number(8)  # valid from
    reader.number(8)  # and until
    for _ in range(3):  # critical options, extensions, and what is reserved
        reader.string()
    return Presented(fingerprint(key), identity, serial, tuple(principals), fingerprint(reader.string()))


def fingerprint(blob: bytes) -> str:
    """Of a public key, as OpenSSH prints it."""
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def _options(line: str) -> tuple[tuple[tuple[str, str | None], ...], str]:
    """The options at the start of a line, and what is behind them."""
    found: list[tuple[str, str | None]] = []
    at = 0
    while True:
        start = at
        while at < len(line) and line[at] not in '=, "':
            at += 1
        name = line[start:at].lower()
        if not name:
            raise ValueError("an option without a name")
        value = None
        if line[at : at + 1] == "=":
            value, at = _value(line, at + 1)
        found.append((name, value))
        if line[at : at + 1] == ",":
            at += 1
            continue
        if line[at : at + 1] != " ":
            raise ValueError("no public key behind the options")
        return tuple(found), line[at:].strip()


def _value(line: str, at: int) -> tuple[str, int]:
    """A value in quotes at `at`, and where it ends."""
    if line[at : at + 1] != '"':
        raise ValueError("an option's value has to be in double quotes")
    at += 1
    value = []
    while at < len(line) and line[at] != '"':
        if line[at : at + 2] == '\\"':
            at += 1
        value.append(line[at])
        at += 1
    if at >= len(line):
        raise ValueError("an option's value has no closing quote")
    return "".join(value), at + 1


def _quoted(value: str) -> str:
    escaped = value.replace('"', '\\"')
    return f'"{escaped}"'


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


class _Reader:
    """Takes what SSH calls strings and numbers from bytes (RFC 4251 section 5)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def string(self) -> bytes:
        return self._take(self.number(4))

    def text(self) -> str:
        try:
            return self.string().decode()
        except UnicodeDecodeError:
            raise ValueError("a name that is no text") from None

    def _take(self, size: int) -> bytes:
        if size > self.left:
            raise ValueError("it is cut off")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken
