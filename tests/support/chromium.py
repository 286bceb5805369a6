"""A real browser, headless, driven by the Chrome DevTools Protocol over its WebSocket.

Owned here: the process, a page, keys, what is shown, what was requested, what went wrong. Each wait is a
promise in the page, with a deadline here.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from hbone.demo.processes import Process
from tests.support.world import PATIENCE_S, find_program, said

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--no-proxy-server",
        "--hide-scrollbars",
    ),
    *("--remote-debugging-port=0", "--disable-background-networking", "--disable-component-update"),
    *("--disable-dev-shm-usage", "--disable-sync", "--window-size=1300,1000"),
)
"""Without the sandbox, for root may not have it, and the only page is ours."""

KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    " ": (32, " "),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
}
"""By name: the code, and the text that it makes."""

_BECOME = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


class Browser:
    """Made by `chromium`: one page."""

    def __init__(self, devtools: ClientConnection) -> None:
        self.requested: list[str] = []
        """The URLs of all requests so far."""
        self.faults: list[str] = []
        """Exceptions, and the console's errors, refusals of the Content-Security-Policy included."""
        self._devtools = devtools
        self._last = 0
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol. Raises AssertionError if it fails."""
        self._last += 1
        self._devtools.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._devtools.recv(timeout=PATIENCE_S))
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._event(message)

    def go(self, url: str) -> None:
        """Loads a page, and returns once it is there."""
        self.command("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def value(self, expression: str) -> Any:
        """That of an expression in the page, or of its promise. Raises AssertionError if it throws."""
        result = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Returns once an expression is true in the page. Raises TimeoutError."""
        look = f"const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look()"
        self.value(f"new Promise((done) => {{ {look} }})")

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key and lets it go; it acts on what has the focus."""
        code, text = KEYS[key]
        about = {"key": key, "code": key if len(key) > 1 else "Space", "windowsVirtualKeyCode": code}
        for _ in range(times):
            self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
            self.command("Input.dispatchKeyEvent", type="keyUp", **about)

    def focused(self) -> str:
        """What has the focus: its tag and its text or label."""
        of = "document.activeElement"
        return str(self.value(f"`${{{of}.tagName}} ${{{of}.ariaLabel || {of}.textContent.trim()}}`"))

    def tab_to(self, wanted: str) -> None:
        """Presses Tab until `wanted` has the focus. Raises AssertionError if it never gets it."""
        seen: list[str] = []
        while wanted not in (now := self.focused()):
            assert len(seen) < 100, seen
            seen.append(now)
            self.press("Tab")

    def prefer(self, scheme: str) -> None:
        """The user's colour scheme from now on: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def _event(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.faults.append(str(told["exceptionDetails"]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.faults.append(told["entry"]["text"])


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in `folder`, until the block ends."""
    command = [find_program("chromium"), *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = Process("chromium", ["-c", _BECOME, *command], {}, folder)
    try:
        beginning = "DevTools listening on ws://"
        record = process.wait_for(lambda record: said(record).startswith(beginning), PATIENCE_S)
        address = said(record).removeprefix(beginning).partition("/")[0]
        with urllib.request.urlopen(f"http://{address}/json/list", timeout=PATIENCE_S) as answer:
            (page,) = [target for target in json.load(answer) if target["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None, ping_interval=None) as devtools:
            yield Browser(devtools)
    finally:
        process.stop()
