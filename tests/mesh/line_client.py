"""Sends lines to a port of 127.0.0.1, and prints what comes back. Arguments: the port, and the lines."""

from __future__ import annotations

import socket
import sys

with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as connection:
    stream = connection.makefile("rw")
    for line in sys.argv[2:]:
        print(line, file=stream, flush=True)
        print(stream.readline(), end="")
