"""gRPC through a client's sidecar; prints what `tests.mesh.grpc_app` answers to the methods named."""

from __future__ import annotations

import sys

import grpc

from tests.mesh.grpc_app import SERVICE
from tests.mesh.workloads import SERVICE as HOST

PATIENCE_S = 20.0

options = [("grpc.default_authority", f"{HOST}:8083"), ("grpc.enable_http_proxy", 0)]
with grpc.insecure_channel("127.0.0.1:8083", options=options) as channel:
    for method in sys.argv[1:]:
        path = f"/{SERVICE}/{method}"
        try:
            if method == "Stream":
                messages = [b"one", b"two", bytes(100_000)]
                echoed = channel.stream_stream(path)(iter(messages), timeout=PATIENCE_S)
                print([len(message) for message in echoed])
            else:
                print(channel.unary_unary(path)(b"hello", timeout=PATIENCE_S).decode())
        except grpc.RpcError as error:
            print(error.code().name, error.details())
