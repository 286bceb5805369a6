"""Clients that offer HTTP/2 and HTTP/1.1, through either mTLS end, to apps that speak one of them.

curl, nghttp and OpenSSL's client come to the mTLS end itself, without a gateway: what hgate carries is the
same bytes. nghttpd is an app that speaks nothing but HTTP/2, the demo's one that speaks nothing but HTTP/1.1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hbone.demo.mesh import CLIENT_FILES, TRUST_DOMAIN
from hbone.demo.processes import Process
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.errors import EXIT_SIGTERM
from tests.path.programs import envoy, run
from tests.support.envoy_config import TYPES, Json, bootstrap, cluster_of, http_chain, tls_socket
from tests.support.world import (
    CALLER,
    INBOUNDS,
    PATIENCE_S,
    WORKLOAD,
    Identity,
    find_envoy,
    find_program,
    free_port,
    word_after,
)

NAME = "hello.example"
"""The workload's in its certificate, for clients that look at names."""

CONTENT = b"content of a file\n"


@dataclass(frozen=True, slots=True)
class End:
    """An mTLS end of a krun of its own, with an app behind it."""

    address: Address
    inbound: str
    app: str
    """What the app speaks: http1 or h2c."""
    protocol: str
    """What krun is told that it speaks."""
    caller: Identity

    @property
    def http_version(self) -> bytes:
        """What curl, which offers both, gets, as it writes it."""
        return b"2" if self.protocol == "h2c" else b"1.1"


@contextmanager
def running(folder: Path, inbound: str, app: str, protocol: str) -> Iterator[End]:
    if inbound == "envoy":
        find_envoy()
    mesh = Authority.create(TRUST_DOMAIN)
    mesh.write(folder / "workload", mesh.issue(WORKLOAD, dns_names=(NAME,)))
    mesh.write(folder / "caller", mesh.issue(CALLER))
    (folder / "files").mkdir()
    (folder / "files" / "hello").write_bytes(CONTENT)
    port = free_port()
    command = {
        "http1": [
            *(sys.executable, "-m", "http.server", "--protocol", "HTTP/1.1", "--bind", "127.0.0.1"),
            *(str(port), "-d", folder / "files"),
        ],
        "h2c": [find_program("nghttpd"), "--no-tls", "-a", "127.0.0.1", "-d", folder / "files", str(port)],
    }[app]
    told = {
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_INBOUND": inbound,
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_APP": f"127.0.0.1:{port}",
        "HBONE_APP_PROTOCOL": protocol,
        "HBONE_CERTS": str(folder / "workload"),
        "HBONE_LOG_FORMAT": "json",
    }
    krun = Process("krun", ["-m", "agent", *map(str, command)], told, folder)
    try:
        address = Address.parse(word_after(krun, f"mTLS end: {inbound}, target of /_hbone/15003: "))
        word_after(krun, "tunnels on ")
        caller = Identity(*(folder / "caller" / file for file in CLIENT_FILES))
        yield End(address, inbound, app, protocol, caller)
    finally:
        assert krun.stop() == EXIT_SIGTERM


@pytest.fixture(
    scope="module",
    params=[
        (inbound, app, protocol)
        for inbound in INBOUNDS
        for app, protocol in (("http1", "http1"), ("http1", "auto"), ("h2c", "h2c"))
    ],
    ids=lambda told: "-".join(told),
)
def end(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    """Those that serve any client that offers both."""
    with running(tmp_path_factory.mktemp("end"), *request.param) as end:
        yield end


@pytest.fixture(scope="module", params=INBOUNDS)
def untold(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    """An app of which nobody has said that it speaks HTTP/2."""
    with running(tmp_path_factory.mktemp("untold"), request.param, "h2c", "auto") as end:
        yield end


def curl(end: End, *arguments: str) -> bytes:
    done = run(
        find_program("curl"),
        *("--silent", "--show-error", "--fail", "--max-time", str(PATIENCE_S), *arguments),
        *("--cacert", end.caller.roots, "--cert", end.caller.certificates, "--key", end.caller.key),
        *("--resolve", f"{NAME}:{end.address.port}:{end.address.host}"),
        *("--write-out", "%{http_version}", f"https://{NAME}:{end.address.port}/hello"),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def nghttp(end: End) -> bytes:
    """It offers nothing but HTTP/2, as gRPC's clients do, and gives up without it."""
    caller = end.caller
    return run(
        find_program("nghttp"),
        *(f"--cert={caller.certificates}", f"--key={caller.key}", f"--header=:authority: {NAME}"),
        f"https://{end.address}/hello",
    ).stdout


def agreed_with_openssl(end: End, offered: str) -> str:
    """What OpenSSL's client says was agreed by ALPN."""
    caller = end.caller
    done = run(
        *(find_program("openssl"), "s_client", "-connect", str(end.address), "-alpn", offered),
        *("-cert", caller.certificates, "-key", caller.key, "-CAfile", caller.roots),
    )
    found = re.search(rb"^ALPN protocol: (.*)$", done.stdout, re.MULTILINE)
    return "" if found is None else found[1].decode()


def test_curl_speaks_what_the_app_speaks(end: End) -> None:
    assert curl(end, "--http2") == CONTENT + end.http_version


def test_openssl_agrees_to_what_the_app_speaks(end: End) -> None:
    """Or, if it has to, to what the app does not speak: that is translated."""
    both = {"h2c": "h2"}.get(end.protocol, "http/1.1")
    assert agreed_with_openssl(end, "h2,http/1.1") == both
    assert agreed_with_openssl(end, "istio,h2,http/1.1") == both
    assert agreed_with_openssl(end, "http/1.1") == "http/1.1"


def test_envoy_that_chooses_by_alpn(end: End, tmp_path: Path) -> None:
    with envoy("chooser", _chooser(end), tmp_path) as address:
        done = run(find_program("curl"), "--silent", "--show-error", "--fail", f"http://{address}/hello")
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", CONTENT)


def test_an_http2_client_is_served_though_nobody_has_said_what_the_app_speaks(untold: End) -> None:
    assert nghttp(untold) == CONTENT
    assert agreed_with_openssl(untold, "h2") == "h2"
    assert agreed_with_openssl(untold, "h2,http/1.1") == "http/1.1"


def test_an_http2_client_gets_on_with_an_http1_app(end: End) -> None:
    """Envoy has to be told that it is one; the built-in end asks the app."""
    translates = end.inbound == "builtin" or end.protocol == "http1"
    assert (nghttp(end) == CONTENT) is (end.app == "h2c" or translates)


def _chooser(end: End) -> Json:
    """An Envoy that takes plain HTTP/1.1 and speaks to the mTLS end what ALPN says."""
    files = (end.caller.certificates, end.caller.key, end.caller.roots)
    protocols = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "auto_config": {"http_protocol_options": {}, "http2_protocol_options": {}},
    }

    cluster = cluster_of(
        "end",
        end.address,
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocols
        },
        transport_socket=tls_socket("Upstream", files),
    )
    route = {"match": {"prefix": "/"}, "route": {"cluster": "end"}}
    return bootstrap(http_chain("chooser", [route]), cluster)
