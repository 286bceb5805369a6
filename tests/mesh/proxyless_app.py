"""A gRPC server that takes TLS and policies from the control plane itself, on $HOST:$PORT."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import grpc

from tests.mesh.grpc_app import HANDLERS


def main() -> None:
    """Serves until it is ended."""
    server = grpc.server(ThreadPoolExecutor(4), xds=True)
    server.add_generic_rpc_handlers((HANDLERS,))
    # Without TLS only where the control plane says so.
    credentials = grpc.xds_server_credentials(grpc.insecure_server_credentials())
    server.add_secure_port(f"{os.environ.get('HOST', '127.0.0.1')}:{os.environ['PORT']}", credentials)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
