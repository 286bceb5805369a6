"""An app that speaks no HTTP: on 127.0.0.1:$PORT it sends back each line, with a word before it."""

from __future__ import annotations

import os
import socketserver


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(b"echo " + line)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(os.environ["PORT"])), Echo).serve_forever()
