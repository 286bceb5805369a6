"""An app that asks $SERVICE by `xds:///`, prints the answers, and ends."""

from __future__ import annotations

import os
import sys

import grpc
from grpc.experimental import insecure_channel_credentials

from tests.mesh.grpc_app import SERVICE

PATIENCE_S = 20.0


def main() -> int:
    """The exit code: 0 if there was an answer."""
    credentials = grpc.xds_channel_credentials(insecure_channel_credentials())
    with grpc.secure_channel(f"xds:///{os.environ['SERVICE']}", credentials) as channel:
        try:
            for method in ("Unary", "Caller"):
                answer = channel.unary_unary(f"/{SERVICE}/{method}")(b"hello", timeout=PATIENCE_S)
                print(method, answer.decode(), flush=True)
        except grpc.RpcError as error:
            print(error.code().name, error.details(), flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
