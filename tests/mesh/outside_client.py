"""A client of the mesh outside of the cluster: HTTP/1.1 requests in one connection of mTLS, by a mesh name.

`python -m tests.mesh.outside_client GATEWAY CERTIFICATES NAME` prints the body of the answer, and sends
another request, with another answer, for each line of standard input.
"""

from __future__ import annotations

import socket
import ssl
import sys
from http.client import HTTPResponse
from pathlib import Path

from shared.address import Address
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE

REQUEST = "GET /from-outside HTTP/1.1\r\nHost: {host}\r\n\r\n"


def main(gateway: str, certificates: str, name: str) -> None:
    folder = Path(certificates)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the server's name is a SPIFFE ID
    context.load_verify_locations(folder / ROOTS_FILE)
    context.load_cert_chain(folder / CERTIFICATES_FILE, folder / PRIVATE_KEY_FILE)
    context.set_alpn_protocols(["istio-http/1.1", "istio", "http/1.1"])
    address = Address.parse(gateway)
    with (
        socket.create_connection((address.host, address.port), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname=name) as tls,
    ):
        _ask(tls, name)
        for _ in sys.stdin:
            _ask(tls, name)


def _ask(tls: ssl.SSLSocket, name: str) -> None:
    _, port, _, host = name.split("_.")
    tls.sendall(REQUEST.format(host=f"{host}:{port}").encode())
    answer = HTTPResponse(tls)
    answer.begin()
    print(answer.read().decode().strip(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
