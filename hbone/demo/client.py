"""The demo's mesh client: HTTPS with a client certificate, as a sidecar or curl sends it."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import socket
import ssl
import time
from dataclasses import dataclass

from hbone.demo.mesh import CLIENT_FILES, Mesh
from shared.errors import UpstreamError
from shared.net.tls.contexts import (
    load_own,
    mesh_context,
    read_file,
    trust,
)

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it."""

    method: str
    path: str
    port: int
    """The client's own port, by which the gateway's log names it."""
    status: int
    sent_bytes: int
    received_bytes: int
    intact: bool
    """Whether the body is right, by SHA-256."""
    peer: str
    """The SPIFFE ID in the server's certificate."""
    tls: str
    connect_s: float
    handshake_s: float
    answer_s: float


def request(mesh: Mesh, sni: str, method: str, path: str, body: bytes = b"") -> Answer:
    """Sends one request through the gateway on a connection of its own.

    Raises:
        UpstreamError: no answer; the text has the TLS alert, if there was one.
    """
    began = time.perf_counter()
    try:
        with socket.create_connection((mesh.gateway.host, mesh.gateway.port), TIMEOUT_S) as plain:
            connected = time.perf_counter()
            # Else the request waits 40 ms for the server's delayed ACK of the handshake's last message.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            port = int(plain.getsockname()[1])
            with _context(mesh).wrap_socket(plain, server_hostname=sni) as tls:
                shaken = time.perf_counter()
                certificate = tls.getpeercert() or {}
                protocol = f"{tls.version()} {(tls.cipher() or ('?',))[0]}"
                connection = http.client.HTTPConnection(sni)
                connection.sock = tls
                connection.request(method, path, body or None, {"connection": "close"})
                # Not by `getresponse`, which closes the connection with an answer that says so.
                response = http.client.HTTPResponse(tls, method=method)
                response.begin()
                data = response.read()
                done = time.perf_counter()
                # In good order, close_notify both ways: closing on unread bytes would reset the connection,
                # and that is what all hops would then log.
                with contextlib.suppress(OSError):
                    tls.unwrap()
                intact = (
                    hashlib.sha256(data).digest() == hashlib.sha256(body).digest() if body else bool(data)
                )
                return Answer(
                    method=method,
                    path=path,
                    port=port,
                    status=response.status,
                    sent_bytes=len(body),
                    received_bytes=len(data),
                    intact=intact,
                    peer=", ".join(value for kind, value in _names(certificate) if kind == "URI"),
                    tls=protocol,
                    connect_s=connected - began,
                    handshake_s=shaken - connected,
                    answer_s=done - shaken,
                )
    except (OSError, http.client.HTTPException) as error:
        text = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise UpstreamError(str(text)) from error


def random_body(size: int) -> bytes:
    """Random bytes, which cannot be right by chance."""
    return os.urandom(size)


def _context(mesh: Mesh) -> ssl.SSLContext:
    certificates, key, roots = (mesh.client_files / name for name in CLIENT_FILES)
    # As a sidecar: the server's name is its SPIFFE ID, which is printed.
    alpn = ("istio-http/1.1", "istio", "http/1.1")
    context = mesh_context(ssl.SSLContext, server=False, alpn=alpn)
    trust(context, read_file(roots))
    load_own(context, certificates, key)
    return context


def _names(certificate: object) -> list[tuple[str, str]]:
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    return [(str(kind), str(value)) for kind, value in names]
