"""istiod's authority on loopback: a gRPC server by others (grpcio, TLS), with messages by others (protobuf).

Checks what istiod checks, a bearer token or a client certificate, and signs with an `Authority`. Tests make
it slow, refuse, or answer what they like.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from shared.address import Address
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.credentials.certificates.istio_ca import METHOD, SERVER_NAME
from shared.trust.spiffe import SpiffeId
from tests.support.tcp_peer import PATIENCE_S

_, _SERVICE, _METHOD_NAME = METHOD.split("/")


def _message_types() -> tuple[type[Any], type[Any]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/istio_ca.proto",
        package="istio.v1.auth",
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    kind, label = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FieldDescriptorProto
    request = file.message_type.add(name="IstioCertificateRequest")
    one = label.LABEL_OPTIONAL
    request.field.add(name="csr", number=1, type=kind.TYPE_STRING, label=one)
    request.field.add(name="validity_duration", number=3, type=kind.TYPE_INT64, label=one)
    request.field.add(
        name="metadata", number=4, type=kind.TYPE_MESSAGE, type_name=".google.protobuf.Struct", label=one
    )
    response = file.message_type.add(name="IstioCertificateResponse")
    response.field.add(name="cert_chain", number=1, type=kind.TYPE_STRING, label=label.LABEL_REPEATED)
    pool = descriptor_pool.Default()
    pool.Add(file)
    found = [pool.FindMessageTypeByName(f"istio.v1.auth.{part.name}") for part in file.message_type]
    first, second = (message_factory.GetMessageClass(descriptor) for descriptor in found)
    return first, second


Request, Response = _message_types()


@dataclass(frozen=True, slots=True)
class Call:
    """What the server was asked."""

    message: Any
    metadata: dict[str, str]
    identity: str
    """The caller's URI in its certificate, or empty."""
    time_left_s: float


@dataclass(slots=True)
class Istiod:
    """Signs for `identity` whoever shows `token` or a certificate of `authority`."""

    authority: Authority
    identity: SpiffeId
    token: str = ""
    review: Callable[[str], SpiffeId] | None = None
    """Whom a bearer token stands for, which is then who is signed for; ValueError for one that is no good."""
    lifetime_s: float | None = None
    """Of its certificates; None: what is asked for."""
    refuse: tuple[grpc.StatusCode, str] | None = None
    """A status for all calls."""
    chain: list[str] | None = None
    """Answered instead of a certificate."""
    raw: bytes | None = None
    """Answered in place of a message."""
    calls: list[Call] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """Open at first; while it is closed (`gate.clear()`) calls are taken and not answered."""
    port: int = 0

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    def roots(self) -> bytes:
        return self.authority.root_pem

    @contextmanager
    def serving(self, own: KeyPair | None = None, *, wants_certificate: bool = False) -> Iterator[Istiod]:
        """Listens until the block ends; `own` is its certificate. With `wants_certificate` every client has
        to have one, without it is asked for none: istiod itself takes both, which grpcio cannot."""
        certificate = own or self.authority.issue(dns_names=[SERVER_NAME])
        credentials = grpc.ssl_server_credentials(
            [(certificate.key_pem, certificate.certificate_pem)],
            root_certificates=self.authority.root_pem,
            require_client_auth=wants_certificate,
        )
        self.gate.set()
        server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(self._create)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD_NAME: handler})]
        )
        self.port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield self
        finally:
            self.gate.set()
            server.stop(grace=0).wait(PATIENCE_S)

    def _create(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        message = Request.FromString(request)
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        caller = context.peer_identities() or []
        identity = next((name.decode() for name in caller if name.startswith(b"spiffe:")), "")
        self.calls.append(Call(message, metadata, identity, context.time_remaining()))
        self.gate.wait(PATIENCE_S)
        if self.refuse is not None:
            context.abort(*self.refuse)
        if self.raw is not None:
            return self.raw
        signed_for = self._judged(metadata.get("authorization", ""))
        if signed_for is None and identity == str(self.identity):
            signed_for = self.identity
        if signed_for is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "authentication failure")
            raise AssertionError("abort raises")
        return self._answer(message, signed_for)

    def _judged(self, authorization: str) -> SpiffeId | None:
        """Whom a bearer token stands for."""
        scheme, _, token = authorization.partition(" ")
        if scheme != "Bearer":
            return None
        if self.review is None:
            return self.identity if self.token and token == self.token else None
        try:
            return self.review(token)
        except ValueError:
            return None

    def _answer(self, message: Any, identity: SpiffeId) -> bytes:
        chain = self.chain
        if chain is None:
            lifetime_s = self.lifetime_s or message.validity_duration
            leaf = self.authority.sign(message.csr.encode(), identity, lifetime_s=lifetime_s)
            chain = [leaf.public_bytes(Encoding.PEM).decode(), self.authority.root_pem.decode()]
        return bytes(Response(cert_chain=chain).SerializeToString())
