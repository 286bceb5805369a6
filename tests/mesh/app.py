"""The app in the container: HTTP/1.1, HTTP/2 without TLS and WebSockets on $HOST:$PORT, by hypercorn.

A request is answered with JSON: what the app saw of it. A WebSocket's messages come back.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """An ASGI application."""
    if scope["type"] == "websocket":
        await _echo(receive, send)
    elif scope["type"] == "http":
        await _answer(scope, receive, send)


async def _answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    received, more = 0, True
    while more:
        event = await receive()
        received += len(event.get("body", b""))
        more = event.get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    told = {"path": scope["path"], "version": scope["http_version"], "headers": headers, "body": received}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


async def _echo(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        if event["type"] == "websocket.connect":
            await send({"type": "websocket.accept"})
        elif event["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": event["text"]})
        else:
            return


if __name__ == "__main__":
    config = Config()
    config.bind = [f"{os.environ.get('HOST', '127.0.0.1')}:{os.environ['PORT']}"]
    asyncio.run(serve(app, config))  # type: ignore[arg-type]
