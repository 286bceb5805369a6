"""A WebSocket through a client's sidecar: prints what comes back for each argument."""

from __future__ import annotations

import socket
import sys

from websockets.sync.client import connect

from tests.mesh.workloads import SERVICE

to_sidecar = socket.create_connection(("127.0.0.1", 8080))
with connect(f"ws://{SERVICE}:8080/", sock=to_sidecar, proxy=None) as websocket:
    for message in sys.argv[1:]:
        websocket.send(message)
        print(websocket.recv(timeout=20))
