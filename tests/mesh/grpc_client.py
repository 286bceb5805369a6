"""gRPC through a client's sidecar; prints what `tests.mesh.grpc_app` answers."""

from __future__ import annotations

import grpc

from tests.mesh.grpc_app import SERVICE
from tests.mesh.workloads import SERVICE as HOST

PATIENCE_S = 20.0

options = [("grpc.default_authority", f"{HOST}:8083"), ("grpc.enable_http_proxy", 0)]
with grpc.insecure_channel("127.0.0.1:8083", options=options) as channel:
    print(channel.unary_unary(f"/{SERVICE}/Unary")(b"hello", timeout=PATIENCE_S))
    messages = [b"one", b"two", bytes(100_000)]
    echoed = channel.stream_stream(f"/{SERVICE}/Stream")(iter(messages), timeout=PATIENCE_S)
    print([len(message) for message in echoed])
    try:
        channel.unary_unary(f"/{SERVICE}/Refused")(b"", timeout=PATIENCE_S)
    except grpc.RpcError as error:
        print(error.code().name, error.details())
