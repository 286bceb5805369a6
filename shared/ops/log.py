"""Log records as single lines on standard error: Cloud Logging's JSON keys, or text for a person.

Secrets are redacted, and a record stays on its one line whatever a peer put into it. Text is for people:
control characters, line separators and unpaired surrogates appear as escapes such as `\\n`. JSON is pure
ASCII, so that no reader can split a line at a character that it takes for a line end.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import traceback
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Literal, TextIO

from shared.errors import HboneError, UsageError
from shared.printable import printable

Format = Literal["json", "text"]

MAX_VALUE_CHARS = 2048
"""Longest message or field: about a screen; what a peer sends must not fill the log."""

MAX_TRACE_CHARS = 4 * MAX_VALUE_CHARS
"""Longest stack trace; its end is kept, for that names the error."""

MAX_SCAN_CHARS = 32 * MAX_VALUE_CHARS
"""What is searched for secrets before the cut: the search is linear, this bounds it too."""

MAX_FRAMES = 20
"""Innermost frames shown of each exception in a stack trace."""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""Names that users can give; Cloud Logging's severities of the same names in capitals."""

# Our loggers hang below this one, so that its level does not open those of libraries: hpack's debug records
# hold every header, the token's among them.
_OURS = logging.getLogger("hbone")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_RESERVED = frozenset({"severity", "message", "timestamp", "logger", "component", "worker", "stack_trace"})
_PLAIN_VALUE = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and equals sign

_CUT = "..."
_REDACTED = "[redacted]"
_SECRETS = re.compile(  # matches in linear time, for peers choose parts of the text
    # A JWT (RFC 7519), whole or cut short: base64url of '{"', then its other parts.
    r"eyJ[\w-]*(?:\.[\w-]+)+\.?"
    r"|eyJ[\w-]{16,}"
    # Any other bearer token (RFC 6750 section 2.1); shorter words are prose ("the bearer token").
    r"|(?i:bearer)\s{1,8}[\w.~+/-]{16,}=*"
    # A private key in PEM (RFC 7468 section 10), also where its line ends became "\n" and its end is missing.
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)",
    re.ASCII | re.DOTALL,
)


def redact(text: str) -> str:
    """`text` with `[redacted]` in place of what looks like a bearer token, a JWT or a private key."""
    return _SECRETS.sub(_REDACTED, text)


def setup(
    format: Format | None,
    level: str,
    stream: TextIO | None = None,
    component: str = "",
) -> None:
    """Makes every record of this process one line on `stream` (default: standard error).

    `format` None means text on a terminal, else JSON. `level` (a name in LEVELS) counts for our own loggers
    `hbone.*`; those of libraries start at warning. A second call replaces the first.

    Raises UsageError for an unknown format or level.
    """
    number = _level_number(level)
    stream = sys.stderr if stream is None else stream
    handler = _Handler(stream)
    chosen = choose_format(format, stream.isatty())
    handler.setFormatter(JsonFormatter(component) if chosen == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    _OURS.setLevel(number)


def level() -> str:
    """The level of our own loggers, a name in LEVELS."""
    number = _OURS.getEffectiveLevel()
    return next((name for name, one in LEVELS.items() if number <= one), "error")


def set_level(level: str) -> None:
    """From now on our own loggers have this level, a name in LEVELS. Raises UsageError for another one."""
    _OURS.setLevel(_level_number(level))


def set_worker(number: int) -> None:
    """From now on every line has this number: the process is one of several that do the same."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler) and isinstance(handler.formatter, JsonFormatter | TextFormatter):
            handler.formatter.worker = number


def choose_format(format: str | None, is_terminal: bool) -> Format:
    """The format to use: the one asked for, else text for a person at a terminal and JSON for a collector.

    Raises UsageError for an unknown format.
    """
    if format is None:
        return "text" if is_terminal else "json"
    if format == "json":
        return "json"
    if format == "text":
        return "text"
    raise UsageError(f"invalid log format {one_line(format)!r}: choose json or text")


def cut(text: str) -> str:
    """`text`, not longer than MAX_VALUE_CHARS; what was cut ends in three dots."""
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - len(_CUT)] + _CUT


def one_line(text: str) -> str:
    """`text` cut, with every character that is not printable as its escape."""
    return cut(printable(cut(text)))


def text_value(value: str) -> str:
    """`value` as it stands behind a `key=` in text: plain, or quoted where it could be misread."""
    value = cut(value)
    return value if _PLAIN_VALUE.fullmatch(value) else encode_basestring_ascii(value)


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as UTC with milliseconds (RFC 3339 section 5.6)."""
    whole, millis = divmod(math.floor(seconds * 1000), 1000)
    return f"{_second(whole)}.{millis:03d}Z"


@lru_cache(maxsize=4)  # many lines share a second, and strftime costs as much as the rest of a line
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines; a stream that is gone ends no process."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lets the record go: a failing log has nowhere to complain, and the default would print its
        arguments unredacted."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with the keys that Cloud Logging knows."""

    worker: int | None = None
    """The process's number among several."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "severity": record.levelname,
            "message": cut(_message(record)),
            "timestamp": timestamp(record.created),
            "logger": record.name,
            "component": self._component,
        }
        if self.worker is not None:
            entry["worker"] = self.worker
        entry.update(_fields(record))
        trace = _stack_trace(record)
        if trace is not None:
            entry["stack_trace"] = trace
        return json.dumps(entry, separators=(",", ":"), allow_nan=False)


class TextFormatter(logging.Formatter):
    """`2026-11-20T05:32:25.123Z INFO hbone.gateway: message key=value`."""

    worker: int | None = None
    """The process's number among several."""

    def format(self, record: logging.LogRecord) -> str:
        message = one_line(_message(record))
        line = f"{timestamp(record.created)} {record.levelname} {record.name}: {message}"
        if self.worker is not None:
            line += f" worker={self.worker}"
        for key, value in _fields(record).items():
            line += f" {text_value(key)}={text_value(value) if isinstance(value, str) else value}"
        trace = _stack_trace(record)
        return line if trace is None else f"{line} stack_trace={encode_basestring_ascii(trace)}"


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError):
        # A wrong format string is our mistake; the arguments may be anything, so they are left out.
        text = f"{record.msg} (arguments do not fit, {record.pathname}:{record.lineno})"
    return redact(text[:MAX_SCAN_CHARS])


def _fields(record: logging.LogRecord) -> dict[str, str | int | float | None]:
    """The record's `extra` fields; a field never replaces one of our own keys."""
    fields: dict[str, str | int | float | None] = {}
    for key, value in vars(record).items():
        if key in _STANDARD or key in _RESERVED:
            continue
        if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            fields[cut(key)] = value
        else:
            fields[cut(key)] = cut(redact(str(value)[:MAX_SCAN_CHARS]))
    return fields


def _stack_trace(record: logging.LogRecord) -> str | None:
    """The stack trace of what nobody foresaw; that of a foreseeable error only at debug."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or (isinstance(error, HboneError) and not _OURS.isEnabledFor(logging.DEBUG)):
        return None
    text = "".join(traceback.format_exception(error, limit=-MAX_FRAMES))
    text = redact(text[-MAX_SCAN_CHARS:]).rstrip("\n")
    return text if len(text) <= MAX_TRACE_CHARS else _CUT + text[len(_CUT) - MAX_TRACE_CHARS :]


def _level_number(level: str) -> int:
    number = LEVELS.get(level.lower())
    if number is None:
        raise UsageError(f"invalid log level {one_line(level)!r}: choose {', '.join(LEVELS)}")
    return number
