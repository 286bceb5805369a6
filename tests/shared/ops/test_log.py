"""Records go in, single lines come out: their form, what is kept out of them, and when traces are shown."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import sys
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.errors import DialError, UsageError
from shared.ops.log import (
    MAX_TRACE_CHARS,
    MAX_VALUE_CHARS,
    JsonFormatter,
    TextFormatter,
    choose_format,
    cut,
    one_line,
    redact,
    set_worker,
    setup,
    text_value,
    timestamp,
)
from tests.support.certificate_requests import key_pem, new_key

JWT = jwt.encode({"aud": "https://hello.a.run.app"}, "a secret of thirty-two bytes or so", algorithm="HS256")
KEY = key_pem(new_key()).decode()
# Characters at which some reader or other ends a line.
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("hbone")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


def record(message: object, *args: object, **extra: Any) -> logging.LogRecord:
    one = logging.LogRecord("hbone.gateway", logging.INFO, "gateway/app.py", 7, message, args, None)
    one.created = 1795152745.1234  # 2026-11-20T05:32:25Z
    vars(one).update(extra)
    return one


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


# The two forms.


def test_json_has_cloud_loggings_keys() -> None:
    line = JsonFormatter("gateway").format(record("route %s is gone", "a", port=8080, peer="10.0.0.1"))
    assert json.loads(line) == {
        "severity": "INFO",
        "message": "route a is gone",
        "timestamp": "2026-11-20T05:32:25.123Z",
        "logger": "hbone.gateway",
        "component": "gateway",
        "port": 8080,
        "peer": "10.0.0.1",
    }


def test_text_is_for_people() -> None:
    line = TextFormatter().format(record("route %s is gone", "a", port=8080, why="it had to be"))
    assert line == (
        '2026-11-20T05:32:25.123Z INFO hbone.gateway: route a is gone port=8080 why="it had to be"'
    )


def test_one_of_several_workers_has_its_number_in_each_line() -> None:
    said = {}
    for format in ("json", "text"):
        stream = io.StringIO()
        setup(format, "info", stream, component="hgate")
        log = logging.getLogger("hbone.gateway")
        log.info("alone")
        set_worker(2)
        log.info("one of several", extra={"worker": 7, "x": 1})
        said[format] = stream.getvalue().splitlines()
    alone, one = map(json.loads, said["json"])
    assert "worker" not in alone
    assert (one["message"], one["worker"], one["x"]) == ("one of several", 2, 1)
    assert said["text"][0].endswith(" INFO hbone.gateway: alone")
    assert said["text"][1].endswith(" INFO hbone.gateway: one of several worker=2 x=1")


def test_a_field_replaces_no_key_of_ours() -> None:
    entry = json.loads(JsonFormatter("gateway").format(record("hello", severity="DEBUG", component="other")))
    assert (entry["severity"], entry["component"]) == ("INFO", "gateway")


def test_fields_of_other_types() -> None:
    fields = {"a": None, "b": True, "c": 1.5, "d": float("nan"), "e": ("x", 1), "f": DialError("no way")}
    entry = json.loads(JsonFormatter("gateway").format(record("hello", **fields)))
    assert [entry[key] for key in "abcdef"] == [None, True, 1.5, "nan", "('x', 1)", "no way"]


def test_arguments_that_do_not_fit_are_left_out() -> None:
    entry = json.loads(JsonFormatter("gateway").format(record("%d tunnels", JWT)))
    assert entry["message"] == "%d tunnels (arguments do not fit, gateway/app.py:7)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1.9999, "1970-01-01T00:00:01.999Z"),
        (-0.5, "1969-12-31T23:59:59.500Z"),
    ],
)
def test_timestamp(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


# One line each, whatever is in it.

hostile = st.text(st.characters() | st.sampled_from(LINE_ENDS + '\x00\x1b"\\= ')) | st.just("x" * 5000)


@given(hostile, hostile)
def test_every_record_is_one_line(message: str, field: str) -> None:
    for formatter in (JsonFormatter("gateway"), TextFormatter()):
        line = formatter.format(record(message, peer=field))
        assert len(line.splitlines()) == 1
        assert line.isprintable()
        assert len(line) < 14 * MAX_VALUE_CHARS


@given(hostile)
@example("\ud800\udc00")
def test_json_gives_the_text_back(message: str) -> None:
    entry = json.loads(JsonFormatter("gateway").format(record(message)))
    # To JSON two surrogates that stand together are one character (RFC 8259 section 7).
    joined = cut(redact(message)).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert entry["message"] == joined


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain text", "plain text"),
        ("müller → 8080", "müller → 8080"),
        ("a\nb\r\x1b[31m", "a\\nb\\r\\x1b[31m"),
        ("\u2028\u202e\udc80", "\\u2028\\u202e\\udc80"),
        ("x" * 2048, "x" * 2048),
        ("x" * 2049, "x" * 2045 + "..."),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("https://hello.a.run.app:443", "https://hello.a.run.app:443"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("a\nb", '"a\\nb"'),
    ],
)
def test_text_value(value: str, text: str) -> None:
    assert text_value(value) == text


# Secrets.


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"token {JWT} was refused", "token [redacted] was refused"),
        (f"authorization: Bearer {JWT}", "authorization: [redacted]"),
        ("x-serverless-authorization: bEARER  ya29.a0AfB_by-C1234", "x-serverless-authorization: [redacted]"),
        (f"Bearer%20{JWT}", "Bearer%20[redacted]"),
        (JWT[:60], "[redacted]"),
        ("eyJhbGci.eyJzdWIi.c2ln", "[redacted]"),
        (f"key:\n{KEY}end", "key:\n[redacted]\nend"),
        (repr({"private_key": KEY}), "{'private_key': '[redacted]\\n'}"),
        (f"cut short: {KEY[:70]}", "cut short: [redacted]"),
        ("the bearer token has expired", "the bearer token has expired"),
        ("-----BEGIN CERTIFICATE-----", "-----BEGIN CERTIFICATE-----"),
        ("eyJ and eyJfoo", "eyJ and eyJfoo"),
    ],
)
def test_redacted(text: str, redacted: str) -> None:
    assert redact(text) == redacted


def test_no_secret_in_any_part_of_a_record() -> None:
    try:
        raise ValueError(f"{JWT} {KEY}")
    except ValueError:
        one = record("%s %s", JWT, KEY, token=JWT, key=KEY, exc_info=sys.exc_info())
    for formatter in (JsonFormatter("gateway"), TextFormatter()):
        line = formatter.format(one)
        assert "stack_trace" in line and "ValueError: [redacted] [redacted]" in line
        assert not [part for part in [*JWT.split("."), *KEY.splitlines()[1:-1]] if part in line]


def test_a_token_does_not_escape_through_the_cut() -> None:
    line = TextFormatter().format(record("x" * (MAX_VALUE_CHARS - 30) + f" {JWT}"))
    assert line.endswith("x [redacted]")


@pytest.mark.parametrize(
    "text", ["eyJ" * 300_000, "eyJ." * 300_000, "-----BEGIN " * 90_000, "bearer " * 150_000]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    redact(text)  # minutes, if it were quadratic


# Stack traces.


def failing(error: Exception) -> None:
    try:
        raise error
    except type(error):
        logging.getLogger("hbone.gateway").error("it failed", exc_info=True)


def test_trace_of_the_unforeseen_in_one_line() -> None:
    stream = io.StringIO()
    setup("json", "info", stream, "gateway")
    failing(ZeroDivisionError("by nothing"))
    (line,) = lines_of(stream)
    trace = json.loads(line)["stack_trace"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("ZeroDivisionError: by nothing")


def test_no_trace_of_the_foreseeable_but_at_debug() -> None:
    stream = io.StringIO()
    setup("text", "info", stream, "gateway")
    failing(DialError("10.0.0.1:443: connection refused"))
    setup("text", "debug", stream, "gateway")
    failing(DialError("10.0.0.1:443: connection refused"))
    without, with_trace = lines_of(stream)
    assert "stack_trace" not in without
    assert 'stack_trace="Traceback' in with_trace


def test_a_long_trace_keeps_its_end() -> None:
    try:
        raise ValueError("x" * 20_000 + " the end")
    except ValueError:
        one = record("it failed", exc_info=sys.exc_info())
    trace = json.loads(JsonFormatter("gateway").format(one))["stack_trace"]
    assert len(trace) == MAX_TRACE_CHARS
    assert trace.endswith("x the end")


# Setting up.


def test_text_on_a_terminal_json_elsewhere() -> None:
    ours, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        setup(None, "info", stream, "gateway")
        logging.getLogger("hbone.gateway").info("hello")
    assert os.read(ours, 1000).endswith(b" INFO hbone.gateway: hello\r\n")
    os.close(ours)

    elsewhere = io.StringIO()
    setup(None, "info", elsewhere, "gateway")
    logging.getLogger("hbone.gateway").info("hello")
    assert json.loads(elsewhere.getvalue())["message"] == "hello"


def test_the_level_is_for_our_loggers() -> None:
    stream = io.StringIO()
    setup("text", "DEBUG", stream, "gateway")
    logging.getLogger("hpack.hpack").debug("authorization: secret")
    logging.getLogger("hbone.gateway").debug("ours")
    logging.getLogger("asyncio").error("theirs")
    assert [line.split(": ")[1] for line in lines_of(stream)] == ["ours", "theirs"]


def test_the_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup("text", "info", first, "gateway")
    setup("text", "warning", second, "gateway")
    logging.getLogger("hbone.gateway").info("not shown")
    logging.getLogger("hbone.gateway").warning("shown")
    assert first.getvalue() == ""
    assert len(lines_of(second)) == 1


def test_what_users_can_get_wrong() -> None:
    with pytest.raises(UsageError, match="invalid log level 'loud': choose debug, info, warning, error"):
        setup("json", "loud")
    with pytest.raises(UsageError, match="invalid log format 'xml': choose json or text"):
        choose_format("xml", False)


def test_a_broken_stream_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    setup("text", "info", stream, "gateway")
    logging.getLogger("hbone.gateway").info("hello")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(BrokenPipeError):
        stream.close()
