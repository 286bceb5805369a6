"""The one tree of errors that users can meet, and what each means at the edge.

- HboneError                  anything foreseeable; never shown with a traceback
  - UsageError                a flag or environment variable is wrong
  - ConfigError               a configuration file is wrong: names file, line, field and reason
    - ConfigErrors            it has several mistakes
  - UnavailableError          something this process needs is not there (a port, a file, a program)
  - RefusedError              the connection or request is refused; says which rule or peer refused it
    - ClientHelloError        the first bytes are no ClientHello that can be routed
    - NoRouteError            no route takes the name
    - DeniedError             the peer's identity is not allowed
      - RevokedError          its certificate, or one above it, has been revoked
      - ExpiredError          its certificate, or one above it, has expired while it was connected
    - TlsFailureError         the peer's TLS handshake failed as TLS
    - LimitError              one too many: says which limit
  - TokenError                no token could be had, so nothing was sent
  - SigningError              an authority has signed no certificate for us
  - UpstreamError             the far side cannot be reached or broke off
    - DialError               TCP or TLS to it failed, or took too long
    - StatusError             it answered with something else than 200
    - StreamResetError        it reset the stream or lost the connection
      - StreamDoneError       it let go of the stream after it had our end, which is no fault
      - ExpelledError         we have ended the connection, for its certificate was revoked, or expired
  - TunnelLimitError          we ended an open tunnel: says which limit
    - IdleError               no byte for too long
    - HalfClosedError         one direction ended, the other was silent for too long
    - LifetimeError           it was old, and at rest
    - LifetimeResetError      it was old, and never at rest
    - OverloadError           it held the most while all tunnels together held too much

Each class carries what the edges need: the process exit code (`exit_code`), the access log's response
flag (`flag`) and the TLS alert that tells an mTLS client about it (`alert`, RFC 8446 section 6, None: no
alert, just a close). Text is lower case, `what: cause`, plus a hint where we have one.
"""

from __future__ import annotations

from collections.abc import Sequence

# Exit codes: the ones of sysexits.h that scripts already know; README lists them.
EXIT_OK = 0
EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_DENIED = 77
EXIT_CONFIG = 78
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

# TLS alert descriptions (RFC 8446 section 6.2) that a refusal can carry.
ALERT_CERTIFICATE_REVOKED = 44
ALERT_ACCESS_DENIED = 49
ALERT_DECODE_ERROR = 50
ALERT_INTERNAL_ERROR = 80
ALERT_UNRECOGNIZED_NAME = 112
ALERT_NO_APPLICATION_PROTOCOL = 120

DOWNSTREAM_RESET = "DOWNSTREAM_RESET"
"""Response flag of a tunnel that the client broke: nobody's fault here, and in no way rare (a client that
closes before it has read the last close_notify)."""


TOKEN_REASONS = (
    "unreachable",
    "refused",
    "garbled",
    "expired",
    "audience",
    "file",
    "limit",
    "rejected",
    "other",
)
"""Why there is no token: nobody there, or no complete answer in time; asked, and told no; an answer that is
no token; one that has expired; one for somebody else; a file that cannot be used; too many are asked for at
once; the far side did not take it; anything else."""


class HboneError(Exception):
    """Anything foreseeable: shown as one line, without a traceback."""

    exit_code = EXIT_INTERNAL
    flag = "INTERNAL"
    alert: int | None = ALERT_INTERNAL_ERROR


class UsageError(HboneError):
    """A flag or an environment variable is wrong."""

    exit_code = EXIT_USAGE


class ConfigError(HboneError):
    """A configuration file is wrong.

    `line` counts from 1 and is None where the file as a whole is meant; `field` is the dotted path of
    the field (`routes[0].token`), empty where there is none.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, file: str, line: int | None, field: str, reason: str) -> None:
        super().__init__(file, line, field, reason)
        self.file = file
        self.line = line
        self.field = field
        self.reason = reason

    @property
    def all(self) -> tuple[ConfigError, ...]:
        """Each mistake by itself."""
        return (self,)

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


class ConfigErrors(ConfigError):
    """Several mistakes of one file, sorted by line; its own line, field and reason are those of the first."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.file, first.line, first.field, first.reason)
        self.errors = tuple(errors)

    @property
    def all(self) -> tuple[ConfigError, ...]:
        return self.errors

    def __str__(self) -> str:
        more = len(self.errors) - 1
        return f"{super().__str__()} (and {more} more {'mistake' if more == 1 else 'mistakes'})"


class UnavailableError(HboneError):
    """Something this process needs is not there: a port, a file, a program."""

    exit_code = EXIT_UNAVAILABLE


class RefusedError(HboneError):
    """The connection or request is refused by one of our rules."""

    exit_code = EXIT_DENIED
    flag = "DENY"
    alert: int | None = ALERT_ACCESS_DENIED


class ClientHelloError(RefusedError):
    """The first bytes are no ClientHello that can be routed (RFC 8446 section 4.1.2)."""

    flag = "BAD_HELLO"
    alert: int | None = ALERT_DECODE_ERROR


class NoRouteError(RefusedError):
    """No route takes the name that the client asked for."""

    flag = "NO_ROUTE"
    alert = ALERT_UNRECOGNIZED_NAME


class DeniedError(RefusedError):
    """The peer proved an identity that is not allowed here."""


class RevokedError(DeniedError):
    """The peer's certificate, or one that vouches for it, is on its issuer's revocation list."""

    alert = ALERT_CERTIFICATE_REVOKED


class ExpiredError(DeniedError):
    """The peer's certificate, or one that vouches for it, has ended while its connection was open."""


class TlsFailureError(RefusedError):
    """The peer's TLS handshake failed as TLS: no certificate, an unknown authority, garbage, too slow."""

    flag = "TLS_FAILURE"
    alert = None  # OpenSSL has sent its own


class LimitError(RefusedError):
    """One too many: `limit` is the setting's name, one of a fixed set, for it becomes a metric's label."""

    flag = "LIMIT"
    alert = ALERT_INTERNAL_ERROR  # it may be otherwise in a moment, which access_denied would deny

    def __init__(self, text: str, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


class TokenError(HboneError):
    """No token could be had, so nothing was sent: `reason` is one of TOKEN_REASONS, for it becomes a metric's
    label."""

    exit_code = EXIT_DENIED
    flag = "IDENTITY_ERROR"

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


class SigningError(HboneError):
    """An authority has signed no certificate for us: it cannot be reached, refuses, or answers garbage."""

    exit_code = EXIT_DENIED
    flag = "IDENTITY_ERROR"


class UpstreamError(HboneError):
    """The far side cannot be reached or broke off."""

    exit_code = EXIT_UNAVAILABLE
    flag = "UPSTREAM"


class DialError(UpstreamError):
    """TCP or TLS to the far side failed, or took too long."""

    flag = "CONNECT"


class StatusError(UpstreamError):
    """The far side answered a tunnel request with something else than 200."""

    flag = "STATUS"

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        if status in (401, 403):
            self.exit_code = EXIT_DENIED
            self.alert = ALERT_ACCESS_DENIED
        elif status == 404:
            self.alert = ALERT_UNRECOGNIZED_NAME


class StreamResetError(UpstreamError):
    """The far side reset the stream (`code`, RFC 9113 section 7) or its connection was lost."""

    flag = "UPSTREAM_RESET"

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class ExpelledError(StreamResetError):
    """We have ended the connection to a peer whose certificate was revoked, or ended, while it was open."""

    flag = "DENY"


class TunnelLimitError(HboneError):
    """An open tunnel came up against a limit of ours, and we ended it."""


class IdleError(TunnelLimitError):
    """No byte passed, either way, for the idle timeout. Both ends got a reset."""

    flag = "IDLE"


class HalfClosedError(TunnelLimitError):
    """One direction had ended, and the other was silent for too long. Both ends got a reset."""

    flag = "HALF_CLOSED"


class LifetimeError(TunnelLimitError):
    """The tunnel was old and at rest, so both ends got an orderly end."""

    flag = "LIFETIME"


class LifetimeResetError(TunnelLimitError):
    """The tunnel was never at rest until its lifetime was over. Both ends got a reset."""

    flag = "LIFETIME_RESET"


class OverloadError(TunnelLimitError):
    """All tunnels together held too many bytes, and this one held the most. Both ends got a reset."""

    flag = "OVERLOAD"


class StreamDoneError(StreamResetError):
    """The far side let go of the stream (NO_ERROR, CANCEL) after all that we had to send, and our end."""
