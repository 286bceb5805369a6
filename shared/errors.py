"""The one tree of errors that users can meet, and what each means at the edge.

- HboneError                  anything foreseeable; never shown with a traceback
  - UsageError                a flag or environment variable is wrong
  - ConfigError               a configuration file is wrong: names file, line, field and reason
    - ConfigErrors            it has several mistakes
  - UnavailableError          something this process needs is not there (a port, a file, a program)
  - StoppedError              the gateway ended before the connection did
  - ClientGoneError           the client broke off while its tunnel was being opened
  - RefusedError              the connection or request is refused; says which rule or peer refused it
    - ClientHelloError        the first bytes are no ClientHello that can be routed
      - NotTlsError           they are no TLS
      - HelloTimeoutError     they were not all there in time
      - EmptyConnectionError  there were none
      - NoNameError           the ClientHello has no server name
    - AlpnError               the ClientHello does not offer Istio's mTLS, which the route demands
    - NoRouteError            no route matches the name
      - SniError              the name has no form that we know
    - BadRequestError         the request asks for no tunnel, or for one that is forbidden to all
    - DeniedError             the peer's identity is not allowed
      - TokenNeededError      it has to show a token, or another one
      - RevokedError          its certificate, or one above it, has been revoked
      - ExpiredError          its certificate, or one above it, has expired while it was connected
    - TokenRejectedError      the caller's token is not accepted
    - TlsFailureError         the peer's TLS handshake failed as TLS
    - LimitError              a limit is reached: says which
    - LeavingError            the gateway is ending, and its successor accepts registrations
  - TokenError                no token could be had, so nothing was sent
    - TokenRefusedError       a token service said no, with an HTTP status
    - OwnClientError          a person's login gives tokens for its own client only
    - TokenDeniedError        the Kubernetes API server said no, and asking again changes nothing
    - SubjectRefusedError     the subject token of a token exchange was refused
    - TargetRefusedError      the token exchange has no token of that kind for anybody
  - SigningError              an authority has signed no certificate for us
  - UpstreamError             the far side cannot be reached or broke off
    - DialError               TCP or TLS to it failed, or took too long
      - KeysError             an issuer's keys cannot be had, so no token can be checked
    - StatusError             it answered with something else than 200
      - ConflictError         fields of an object of the cluster have another owner, and another value
    - StreamResetError        it reset the stream or lost the connection
      - StreamLeftError       it let go of the stream without a fault
        - StreamDoneError     after it had our end
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

Exceptions that only one room raises and catches itself, and that no user meets, stay in that room.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

# Exit codes: the ones of sysexits.h that scripts already know.
EXIT_OK = 0
EXIT_USAGE = 64
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_DENIED = 77
EXIT_CONFIG = 78
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

EXIT_CODES = {
    EXIT_OK: "ended in order",
    EXIT_USAGE: "a flag or an environment variable is wrong",
    EXIT_UNAVAILABLE: "something needed is not there: a port in use, a file, a program, the far side, or it "
    "no longer answers",
    EXIT_INTERNAL: "a fault of ours",
    EXIT_DENIED: "refused, or no token or certificate could be had",
    EXIT_CONFIG: "a mistake in a configuration file",
    EXIT_SIGINT: "interrupted (SIGINT); hgate: by a second one",
    EXIT_SIGTERM: "ended by SIGTERM before it served (by SIGINT: 130); hgate: by a second one",
}
"""What each tells a script, for documents."""

# TLS alert descriptions (RFC 8446 section 6.2) that a refusal can carry.
ALERT_CERTIFICATE_REVOKED = 44
ALERT_ACCESS_DENIED = 49
ALERT_DECODE_ERROR = 50
ALERT_INTERNAL_ERROR = 80
ALERT_UNRECOGNIZED_NAME = 112
ALERT_NO_APPLICATION_PROTOCOL = 120


class Flag(StrEnum):
    """The response flags: how a connection or tunnel ended. They are values of the access log's `flags` and
    of metrics' labels."""

    meaning: str
    client_sees: str

    def __new__(cls, value: str, meaning: str, client_sees: str) -> Flag:
        """`meaning` and `client_sees` are Markdown for the reference."""
        flag = str.__new__(cls, value)
        flag._value_ = value
        flag.meaning = meaning
        flag.client_sees = client_sees
        return flag

    NONE = "-", "an orderly end", ""
    NOT_TLS = "NOT_TLS", "the first bytes are no TLS", "a close"
    HELLO_TIMEOUT = "HELLO_TIMEOUT", "no whole ClientHello came in time", "a close"
    EMPTY = "EMPTY", "the client closed without a byte, as health checks do; not in the access log", "a close"
    BAD_HELLO = "BAD_HELLO", "the ClientHello is malformed, too large or cut off", "decode_error"
    NO_SNI = "NO_SNI", "the ClientHello has no server name", "unrecognized_name"
    BAD_SNI = "BAD_SNI", "the server name has no form that hgate knows", "unrecognized_name"
    NO_ROUTE = "NO_ROUTE", "no route matches the name; at krun: no such target", "unrecognized_name; 404"
    ALPN = (
        "ALPN",
        "the name is one of Istio's on a `forward:` route, and the client does not offer Istio's ALPN",
        "no_application_protocol",
    )
    IDENTITY_ERROR = (
        "IDENTITY_ERROR",
        "no token could be had; on the HBONE port: no keys to check a token with",
        "internal_error; 503",
    )
    CONNECT = (
        "CONNECT",
        "the service cannot be reached: its name is not found, nobody has registered it, or the dial failed",
        "internal_error; 503",
    )
    UPSTREAM = "UPSTREAM", "the service does not answer in time, or not in HTTP/2", "internal_error"
    STATUS = (
        "STATUS",
        "the service answered with another status than 200",
        "access_denied (401, 403), unrecognized_name (404), internal_error",
    )
    UPSTREAM_RESET = (
        "UPSTREAM_RESET",
        "the service reset the tunnel, or the request for it, or the connection was lost",
        "RST; internal_error",
    )
    DOWNSTREAM_RESET = (
        "DOWNSTREAM_RESET",
        "the client broke off; nobody's fault here, logged at INFO",
        "",
    )
    DENY = (
        "DENY",
        "the peer's identity is not allowed, or its certificate is revoked or has expired (the line says so)",
        "access_denied or certificate_revoked; krun: internal_error; on the HBONE port 401; GOAWAY; RST",
    )
    TLS_FAILURE = (
        "TLS_FAILURE",
        "the peer's TLS handshake failed: no certificate, an unknown authority, or too slow",
        "the TLS library's alert",
    )
    LIMIT = (
        "LIMIT",
        "a limit is reached, which the line names, or no file descriptor is left",
        "RST; after the ClientHello internal_error; 503",
    )
    IDLE = "IDLE", "no byte passed an open tunnel for the idle timeout", "RST"
    HALF_CLOSED = "HALF_CLOSED", "one direction ended, and the other was silent for too long", "RST"
    LIFETIME = "LIFETIME", "an old tunnel was at rest and ended in order; logged at INFO", "FIN"
    LIFETIME_RESET = "LIFETIME_RESET", "an old tunnel was never at rest", "RST"
    OVERLOAD = "OVERLOAD", "all tunnels together held too many bytes, and this one held the most", "RST"
    STOPPED = "STOPPED", "the gateway ended first", "RST; internal_error"
    BAD_REQUEST = "BAD_REQUEST", "on the HBONE port: no CONNECT, no target, or a forbidden one", "405; 400"
    INTERNAL = "INTERNAL", "a fault of ours", "internal_error"


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
    flag: Flag = Flag.INTERNAL
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


class StoppedError(HboneError):
    """The gateway ended before the connection did."""

    flag = Flag.STOPPED


class ClientGoneError(HboneError):
    """The client broke off while its tunnel was being opened."""

    flag = Flag.DOWNSTREAM_RESET
    alert = None

    def __init__(self) -> None:
        super().__init__("the client broke off before its tunnel was open")


class RefusedError(HboneError):
    """The connection or request is refused by one of our rules."""

    exit_code = EXIT_DENIED
    flag = Flag.DENY
    alert: int | None = ALERT_ACCESS_DENIED


class ClientHelloError(RefusedError):
    """The first bytes are no ClientHello that can be routed (RFC 8446 section 4.1.2)."""

    flag = Flag.BAD_HELLO
    alert: int | None = ALERT_DECODE_ERROR


class NotTlsError(ClientHelloError):
    """The first bytes are no TLS handshake, so their sender would not understand a TLS alert either."""

    flag = Flag.NOT_TLS
    alert = None


class HelloTimeoutError(ClientHelloError):
    """The ClientHello was not whole in time."""

    flag = Flag.HELLO_TIMEOUT
    alert = None


class EmptyConnectionError(ClientHelloError):
    """The peer closed without a byte: a load balancer's health check, not worth a line in the log."""

    flag = Flag.EMPTY
    alert = None


class NoNameError(ClientHelloError):
    """The ClientHello carries no server name, so there is nothing to route by."""

    flag = Flag.NO_SNI
    alert = ALERT_UNRECOGNIZED_NAME


class AlpnError(RefusedError):
    """The name is one of Istio's, and the ClientHello does not say that the mesh's mTLS follows."""

    flag = Flag.ALPN
    alert = ALERT_NO_APPLICATION_PROTOCOL


class NoRouteError(RefusedError):
    """No route matches the name that the client asked for."""

    flag = Flag.NO_ROUTE
    alert = ALERT_UNRECOGNIZED_NAME


class SniError(NoRouteError):
    """The server name looks like Istio's but is not, or is no DNS name at all."""

    flag = Flag.BAD_SNI


class BadRequestError(RefusedError):
    """The request is not one that the HBONE port accepts from anybody."""

    flag = Flag.BAD_REQUEST


class DeniedError(RefusedError):
    """The peer proved an identity that is not allowed here."""


class TokenNeededError(DeniedError):
    """The rules ask for a token, or for another one; `challenge` is the answer's `www-authenticate`."""

    def __init__(self, text: str, challenge: bytes) -> None:
        super().__init__(text)
        self.challenge = challenge


class RevokedError(DeniedError):
    """The peer's certificate, or one that vouches for it, is on its issuer's revocation list."""

    alert = ALERT_CERTIFICATE_REVOKED


class ExpiredError(DeniedError):
    """The peer's certificate, or one that vouches for it, has ended while its connection was open."""


class TokenRejectedError(RefusedError):
    """A caller's token is not accepted; `status` is the HTTP status for it, `kind` one word of a fixed set,
    for it becomes a metric's label."""

    def __init__(self, status: int, reason: str, kind: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason
        self.kind = kind

    def __str__(self) -> str:
        return f"token rejected: {self.reason}"


class TlsFailureError(RefusedError):
    """The peer's TLS handshake failed as TLS: no certificate, an unknown authority, garbage, too slow."""

    flag = Flag.TLS_FAILURE
    alert = None  # OpenSSL has sent its own


class LimitError(RefusedError):
    """A limit is reached: `limit` is the setting's name, of a fixed set, for it becomes a metric's label."""

    flag = Flag.LIMIT
    alert = ALERT_INTERNAL_ERROR  # it may be otherwise in a moment, which access_denied would deny

    def __init__(self, text: str, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


class LeavingError(RefusedError):
    """The gateway is ending: a workload registers with its successor."""

    flag = Flag.STOPPED


class TokenError(HboneError):
    """No token could be had, so nothing was sent: `reason` is one of TOKEN_REASONS, for it becomes a metric's
    label."""

    exit_code = EXIT_DENIED
    flag = Flag.IDENTITY_ERROR

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


class TokenRefusedError(TokenError):
    """A token service said no; `status` is the HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text, "refused")
        self.status = status


class OwnClientError(TokenError):
    """A person's login gives tokens for its own client only, whose name is the audience `client`."""

    def __init__(self, text: str, client: str) -> None:
        super().__init__(text)
        self.client = client


class TokenDeniedError(TokenError):
    """The Kubernetes API server said no: asking again changes nothing until somebody changes something."""


class SubjectRefusedError(TokenError):
    """Google said no to this subject token, or to what is asked for with it."""


class TargetRefusedError(TokenError):
    """No token of that kind can be had here, whoever asks."""


class SigningError(HboneError):
    """An authority has signed no certificate for us: it cannot be reached, refuses, or answers garbage."""

    exit_code = EXIT_DENIED
    flag = Flag.IDENTITY_ERROR


class UpstreamError(HboneError):
    """The far side cannot be reached or broke off."""

    exit_code = EXIT_UNAVAILABLE
    flag = Flag.UPSTREAM

    def __init__(self, text: str, *, passes: bool = False) -> None:
        """`passes`: a far side that is just starting is a possible cause."""
        super().__init__(text)
        self.passes = passes


class DialError(UpstreamError):
    """TCP or TLS to the far side failed, or took too long."""

    flag = Flag.CONNECT


class KeysError(DialError):
    """The keys of an issuer cannot be had, so nobody can say whether a token is good (503)."""

    flag = Flag.IDENTITY_ERROR


class StatusError(UpstreamError):
    """The far side answered a tunnel request with something else than 200."""

    flag = Flag.STATUS

    def __init__(self, status: int, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        self.pause_s = pause_s
        """Seconds that the answer asks to wait (Retry-After, RFC 9110 section 10.2.3); 0: it says nothing."""
        if status in (401, 403):
            self.exit_code = EXIT_DENIED
            self.alert = ALERT_ACCESS_DENIED
        elif status == 404:
            self.alert = ALERT_UNRECOGNIZED_NAME


class ConflictError(StatusError):
    """Fields of an object of the cluster have another owner, and another value."""

    exit_code = EXIT_DENIED

    def __init__(self, text: str) -> None:
        super().__init__(409, text)


class StreamResetError(UpstreamError):
    """The far side reset the stream (`code`, RFC 9113 section 7) or its connection was lost."""

    flag = Flag.UPSTREAM_RESET

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        self.sent_all = False
        """All that we had to send had gone out, with our end."""


class ExpelledError(StreamResetError):
    """We have ended the connection to a peer whose certificate was revoked, or ended, while it was open."""

    flag = Flag.DENY


class TunnelLimitError(HboneError):
    """An open tunnel came up against a limit of ours, and we ended it."""


class IdleError(TunnelLimitError):
    """No byte passed, either way, for the idle timeout. Both ends got a reset."""

    flag = Flag.IDLE


class HalfClosedError(TunnelLimitError):
    """One direction had ended, and the other was silent for too long. Both ends got a reset."""

    flag = Flag.HALF_CLOSED


class LifetimeError(TunnelLimitError):
    """The tunnel was old and at rest, so both ends got an orderly end."""

    flag = Flag.LIFETIME


class LifetimeResetError(TunnelLimitError):
    """The tunnel was never at rest until its lifetime was over. Both ends got a reset."""

    flag = Flag.LIFETIME_RESET


class OverloadError(TunnelLimitError):
    """All tunnels together held too many bytes, and this one held the most. Both ends got a reset."""

    flag = Flag.OVERLOAD


class StreamLeftError(StreamResetError):
    """The peer let go of the stream without a fault (RST_STREAM with NO_ERROR or CANCEL)."""


class StreamDoneError(StreamLeftError):
    """The peer did so after all that we had to send, and our end."""
