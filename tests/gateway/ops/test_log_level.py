"""/logging: GET shows and changes nothing, POST changes, and what is wrong with a request is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gateway.ops import log_level
from shared.ops import log as logs
from shared.ops.http_server import Request, Response


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    logger = logging.getLogger("hbone")
    before = logger.level
    logs.set_level("info")
    yield
    logger.setLevel(before)


def post(**query: str) -> Response:
    return log_level.changed(Request("POST", "/logging", query))


def get(levels: dict[int, str], **query: str) -> tuple[int, str]:
    response = log_level.shown(Request("GET", "/logging", query), levels)
    return response.status, response.body.decode()


def test_a_level_is_used_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hbone.gateway")
    assert post(level="DEBUG").body == b"debug\n"
    assert logs.level() == "debug"
    assert logging.getLogger("hbone.pool").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("hpack").isEnabledFor(logging.DEBUG), "a library's records hold the token"
    assert caplog.messages == ["the log level is debug now, by POST /logging; it was info"]


@pytest.mark.parametrize(
    "query", [{}, {"level": ""}, {"level": "loud"}, {"level": "info\r\nx: y"}, {"lvl": "info"}]
)
def test_what_is_no_level_is_refused_with_how_it_is_done(query: dict[str, str]) -> None:
    response = post(**query)
    assert response.status == 400
    assert (
        "send POST /logging?level=LEVEL, where LEVEL is one of debug, info, warning, error"
        in response.body.decode()
    )
    assert response.body.count(b"\n") == 1
    assert logs.level() == "info"


def test_a_get_that_names_a_level_is_told_that_it_changes_nothing() -> None:
    status, text = get({1: "info"}, level="debug")
    assert (status, text.partition(";")[0]) == (400, "GET changes nothing")
    assert logs.level() == "info"


def test_workers_with_one_level_are_one_word_and_others_a_line_each() -> None:
    assert get({1: "info", 2: "info"}) == (200, "info\n")
    assert get({1: "info", 2: "debug"}) == (200, "worker 1: info\nworker 2: debug\n")


def test_a_worker_is_asked_by_path() -> None:
    handlers = log_level.of_worker()
    for one in ("error", "debug"):
        handlers[f"/logging/{one}"](Request("GET", f"/logging/{one}"))
        shown = handlers["/logging"](Request("GET", "/logging"))
        assert isinstance(shown, Response)
        assert shown.body == f"{one}\n".encode()
