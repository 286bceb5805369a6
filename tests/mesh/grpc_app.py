"""An app that speaks gRPC on 127.0.0.1:$PORT. Its methods take bytes as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

SERVICE = "hbone.Echo"


def unary(message: bytes, _context: grpc.ServicerContext) -> bytes:
    return message.upper()


def stream(messages: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from messages


def refused(_message: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today")
    raise AssertionError


def caller(_message: bytes, context: grpc.ServicerContext) -> bytes:
    """The SPIFFE ID in the certificate that the server itself has seen."""
    return b",".join(context.auth_context().get("peer_spiffe_id", [b"nobody"]))


HANDLERS = grpc.method_handlers_generic_handler(
    SERVICE,
    {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
        "Refused": grpc.unary_unary_rpc_method_handler(refused),
        "Caller": grpc.unary_unary_rpc_method_handler(caller),
    },
)


def main() -> None:
    """Serves until it is ended."""
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((HANDLERS,))
    server.add_insecure_port(f"127.0.0.1:{os.environ['PORT']}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
