"""gRPC from a client's sidecar with each kind of mTLS end: a call, a stream, a status in trailers."""

from __future__ import annotations

from tests.mesh.workloads import run_client

APP, PROTOCOL = "tests.mesh.grpc_app", "GRPC"


def test_calls(end: str) -> None:
    methods = ("Unary", "Stream", "Refused")
    answered, echoed, refused = run_client("web", "tests.mesh.grpc_client", *methods).splitlines()
    assert answered == "HELLO"
    assert echoed == "[3, 3, 100000]"
    assert refused == "FAILED_PRECONDITION not today"
