"""The demo's app: answers GET with a greeting and POST with what it got, on PORT."""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY_BYTES = 64 << 20
"""More than the demo sends, less than a small machine has."""


class Hello(BaseHTTPRequestHandler):
    """One connection's requests."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a client to send the next request
    disable_nagle_algorithm = True  # the header and the body are two writes

    def do_GET(self) -> None:
        self._answer(f"hello from the app, you asked for {self.path}\n".encode(), "text/plain")

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "0")
        if "transfer-encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self.send_error(411)  # closes the connection: where the body ends is not known here
            return
        size = int(length)
        if size > MAX_BODY_BYTES:
            self.send_error(413)
            return
        self._answer(self.rfile.read(size), "application/octet-stream")

    def log_message(self, format: str, *args: object) -> None:
        pass  # the demo prints what happened

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serves until a signal ends the process."""
    with ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Hello) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
