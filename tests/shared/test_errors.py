"""The error tree as the edges see it: exit codes, access-log flags, TLS alerts, texts."""

from __future__ import annotations

import inspect

import pytest

from shared import errors
from shared.errors import ConfigError, ConfigErrors, Flag, HboneError, StatusError

TABLE = {
    "HboneError": (70, "INTERNAL", 80),
    "UsageError": (64, "INTERNAL", 80),
    "ConfigError": (78, "INTERNAL", 80),
    "ConfigErrors": (78, "INTERNAL", 80),
    "UnavailableError": (69, "INTERNAL", 80),
    "RefusedError": (77, "DENY", 49),
    "ClientHelloError": (77, "BAD_HELLO", 50),
    "NoRouteError": (77, "NO_ROUTE", 112),
    "DeniedError": (77, "DENY", 49),
    "TlsFailureError": (77, "TLS_FAILURE", None),
    "LimitError": (77, "LIMIT", 80),
    "TokenError": (77, "IDENTITY_ERROR", 80),
    "SigningError": (77, "IDENTITY_ERROR", 80),
    "UpstreamError": (69, "UPSTREAM", 80),
    "DialError": (69, "CONNECT", 80),
    "StatusError": (69, "STATUS", 80),
    "ConflictError": (77, "STATUS", 80),
    "StreamResetError": (69, "UPSTREAM_RESET", 80),
    "TunnelLimitError": (70, "INTERNAL", 80),
    "IdleError": (70, "IDLE", 80),
    "LifetimeError": (70, "LIFETIME", 80),
    "LifetimeResetError": (70, "LIFETIME_RESET", 80),
    "OverloadError": (70, "OVERLOAD", 80),
    "StreamLeftError": (69, "UPSTREAM_RESET", 80),
    "StreamDoneError": (69, "UPSTREAM_RESET", 80),
    "HalfClosedError": (70, "HALF_CLOSED", 80),
    "RevokedError": (77, "DENY", 44),
    "ExpiredError": (77, "DENY", 49),
    "ExpelledError": (69, "DENY", 80),
    "StoppedError": (70, "STOPPED", 80),
    "ClientGoneError": (70, "DOWNSTREAM_RESET", None),
    "NotTlsError": (77, "NOT_TLS", None),
    "HelloTimeoutError": (77, "HELLO_TIMEOUT", None),
    "EmptyConnectionError": (77, "EMPTY", None),
    "NoNameError": (77, "NO_SNI", 112),
    "AlpnError": (77, "ALPN", 120),
    "SniError": (77, "BAD_SNI", 112),
    "BadRequestError": (77, "BAD_REQUEST", 49),
    "TokenNeededError": (77, "DENY", 49),
    "TokenRejectedError": (77, "DENY", 49),
    "LeavingError": (77, "STOPPED", 49),
    "TokenRefusedError": (77, "IDENTITY_ERROR", 80),
    "OwnClientError": (77, "IDENTITY_ERROR", 80),
    "TokenDeniedError": (77, "IDENTITY_ERROR", 80),
    "SubjectRefusedError": (77, "IDENTITY_ERROR", 80),
    "TargetRefusedError": (77, "IDENTITY_ERROR", 80),
    "KeysError": (69, "IDENTITY_ERROR", 80),
}
"""Exit code, response flag, alert."""

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, HboneError)
}


def test_what_each_class_means_at_the_edges() -> None:
    assert {name: (kind.exit_code, kind.flag, kind.alert) for name, kind in CLASSES.items()} == TABLE


def test_the_drawing_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        indent, dash, text = line.partition("- ")
        if dash and not indent.strip():
            name = text.split()[0]
            del above[len(indent) // 2 :]
            drawn[name] = above[-1] if above else "Exception"
            above.append(name)
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}


def test_every_flag_has_an_error() -> None:
    assert {kind.flag for kind in CLASSES.values()} == set(Flag) - {Flag.NONE}


def test_each_has_a_docstring() -> None:
    assert [name for name, kind in CLASSES.items() if not kind.__doc__] == []


@pytest.mark.parametrize(
    ("status", "exit_code", "alert"),
    [
        (401, errors.EXIT_DENIED, errors.ALERT_ACCESS_DENIED),
        (403, errors.EXIT_DENIED, errors.ALERT_ACCESS_DENIED),
        (404, errors.EXIT_UNAVAILABLE, errors.ALERT_UNRECOGNIZED_NAME),
        (429, errors.EXIT_UNAVAILABLE, errors.ALERT_INTERNAL_ERROR),
        (503, errors.EXIT_UNAVAILABLE, errors.ALERT_INTERNAL_ERROR),
        (0, errors.EXIT_UNAVAILABLE, errors.ALERT_INTERNAL_ERROR),
    ],
)
def test_status_errors(status: int, exit_code: int, alert: int) -> None:
    error = StatusError(status, f"answered {status}")
    assert (error.status, error.exit_code, error.alert, error.flag) == (status, exit_code, alert, "STATUS")
    assert str(error) == f"answered {status}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ConfigError("hgate.yaml", 7, "routes[0].token", "no such field"),
            "hgate.yaml:7: routes[0].token: no such field",
        ),
        (ConfigError("hgate.yaml", 7, "", "a tab"), "hgate.yaml:7: a tab"),
        (ConfigError("hgate.yaml", None, "", "cannot be read"), "hgate.yaml: cannot be read"),
        (ConfigError("hgate.yaml", None, "listen", "missing"), "hgate.yaml: listen: missing"),
    ],
)
def test_config_errors_name_the_place(error: ConfigError, text: str) -> None:
    assert str(error) == text


def test_several_config_errors() -> None:
    one, other = ConfigError("f", 1, "a", "is wrong"), ConfigError("f", 2, "b", "is wrong, too")
    assert str(ConfigErrors([one, other])) == "f:1: a: is wrong (and 1 more mistake)"
    assert str(ConfigErrors([one, other, one])) == "f:1: a: is wrong (and 2 more mistakes)"
    assert ConfigErrors([one, other]).all == (one, other)
    assert one.all == (one,)
