"""What is asked again, and what not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from agent.mesh import patience
from agent.mesh.patience import patiently
from shared.errors import DialError, HboneError, StatusError, TokenError, UpstreamError

log = logging.getLogger("hbone.test")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.002)


class Server:
    """Fails with `errors`, then answers."""

    def __init__(self, *errors: HboneError) -> None:
        self.errors = list(errors)
        self.asked = 0

    async def answer(self) -> str:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_a_server_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(DialError("refused"), StatusError(503, "busy"), StatusError(429, "slower"))
    assert await patiently(server.answer, "MESH", log, 5) == "answer"
    assert caplog.messages == [
        "MESH: refused; again in 0.001 s",
        "MESH: busy; again in 0.002 s",
        "MESH: slower; again in 0.002 s",
    ]


@pytest.mark.parametrize(
    "error",
    [lambda: StatusError(403, "no"), lambda: StatusError(404, "none"), lambda: TokenError("no token")],
)
async def test_an_answer_that_will_not_change_is_not_asked_for_again(error: Callable[[], HboneError]) -> None:
    server = Server(error())
    with pytest.raises(HboneError):
        await patiently(server.answer, "MESH", log, 5)
    assert server.asked == 1


async def test_patience_has_an_end() -> None:
    server = Server(*(UpstreamError("away") for _ in range(1000)))
    with pytest.raises(UpstreamError, match="away"):
        await patiently(server.answer, "MESH", log, 0.02)
    assert 1 < server.asked < 30
