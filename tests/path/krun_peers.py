"""Other programs in the place of Cloud Run's front end, and of hgate, before krun's tunnel port.

    plain TCP → Envoy as a POST client → krun → app                        (`envoy_poster`)
    hello and bytes → hgate → nghttpx, HAProxy or Envoy → krun → app       (`FRONT_ENDS`)

Owned here: their configurations, and krun as a process. What they carry is the tests'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hbone.demo.processes import Process
from shared.address import Address
from shared.errors import EXIT_OK
from shared.net.tls import certificate_folder
from tests.path.programs import envoy, start
from tests.support.envoy_config import (
    HTTP2,
    LOOPBACK,
    TYPES,
    Json,
    bootstrap,
    cluster_of,
    http_chain,
    tcp_chain,
    tls_socket,
)
from tests.support.world import PATIENCE_S, find_program, free_port, said, word_after

HOST_NAME = "hello.run.test"
"""The service's, for which the front end has a certificate."""

TARGET_PATH = "/_hbone/15003"
INNER_PATH = "/_hbone/15008"

MAX_STREAMS = 100

FrontEnd = Callable[[Path, Path, Address], AbstractContextManager[Address]]
"""Made of a folder for its files, one with its certificate, and krun's address; where it listens."""


@contextmanager
def krun(folder: Path, **environ: str) -> Iterator[tuple[Process, Address]]:
    """krun without an mTLS end, and its tunnel port; `environ` is what it is told besides. It has to stop in
    order."""
    told = {
        "XDS_ADDR": "-",
        "HBONE_LISTEN": str(LOOPBACK),
        "HBONE_INBOUND": "none",
        "HBONE_STARTUP_PROBE": "-",
        "HBONE_LOG_FORMAT": "json",
        **environ,
    }
    process = Process("krun", ["-m", "agent"], told, folder)
    try:
        yield process, Address.parse(word_after(process, "tunnels on "))
    finally:
        assert process.stop() == EXIT_OK


@contextmanager
def envoy_poster(folder: Path, container: Address, path: str = TARGET_PATH) -> Iterator[Address]:
    """An Envoy that carries plain TCP in POST streams to krun's `path`; where it accepts connections."""
    tunneling = {"hostname": HOST_NAME, "use_post": True, "post_path": path}
    chain = tcp_chain("krun", tunneling_config=tunneling)
    with envoy("envoy-poster", bootstrap(chain, _krun(container)), folder) as address:
        yield address


@contextmanager
def envoy_inner(folder: Path, container: Address, own: Path, authority: str) -> Iterator[Address]:
    """An Envoy that carries plain TCP in inner HBONE, with the certificate in `own`, to krun: a CONNECT for
    `authority` in TLS of the mesh, and that in a POST stream. Where it accepts connections."""
    inner = cluster_of("inner", LOOPBACK)
    files = certificate_folder.find(own).all
    socket = tls_socket("Upstream", files, "h2")
    versions = {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"}
    socket["typed_config"]["common_tls_context"]["tls_params"] = versions
    inner["transport_socket"] = socket
    where = {"address": {"envoy_internal_address": {"server_listener_name": "carrier"}}}
    inner["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": where}]}]
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    once = {"common_http_protocol_options": {"max_requests_per_connection": 1}}
    inner["typed_extension_protocol_options"] = {options: {**HTTP2[options], **once}}
    tunneling = {"hostname": HOST_NAME, "use_post": True, "post_path": INNER_PATH}
    carrier = {
        "name": "carrier",
        "internal_listener": {},
        "filter_chains": [tcp_chain("krun", tunneling_config=tunneling)],
    }
    configuration = bootstrap(
        tcp_chain("inner", tunneling_config={"hostname": authority}), inner, _krun(container)
    )
    configuration["static_resources"]["listeners"].append(carrier)
    configuration["bootstrap_extensions"] = [
        {
            "name": "envoy.bootstrap.internal_listener",
            "typed_config": {"@type": f"{TYPES}.bootstrap.internal_listener.v3.InternalListener"},
        }
    ]
    with envoy("envoy-inner", configuration, folder) as address:
        yield address


@contextmanager
def envoy_front(
    folder: Path, own: Path, container: Address, *, runtime: Json | None = None
) -> Iterator[Address]:
    """An Envoy that ends TLS and passes requests on to krun; where it listens."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "krun", "timeout": "0s"}}
    chain = http_chain("inbound", [route], codec_type="HTTP2", stream_idle_timeout="0s")
    certificates, key, _ = certificate_folder.find(own).all
    chain["transport_socket"] = tls_socket("Downstream", (certificates, key), "h2")
    with envoy("envoy-front", bootstrap(chain, _krun(container), runtime=runtime), folder) as address:
        yield address


@contextmanager
def nghttpx(
    folder: Path,
    behind: Address,
    *more: str,
    address: Address | None = None,
    front: str = "",
    back: str = ";;proto=h2",
) -> Iterator[Address]:
    """nghttpx on `address`, else on a free port, before `behind`; `front` and `back` are its settings for
    either side, `more` its further arguments."""
    address = address or Address("127.0.0.1", free_port())
    command = [
        *(find_program("nghttpx"), "--workers=1", "--conf=/dev/null", "--no-ocsp"),
        f"--frontend={address.host},{address.port}{front}",
        f"--backend={behind.host},{behind.port}{back}",
        *("--accesslog-file=/dev/null", "--errorlog-file=/dev/stderr", "--log-level=NOTICE"),
        *more,
    ]
    process = start("nghttpx", command, folder)
    try:
        process.wait_for(lambda record: "Listening on" in said(record), PATIENCE_S)
        yield address
    finally:
        process.stop()


@contextmanager
def _nghttpx(folder: Path, own: Path, container: Address) -> Iterator[Address]:
    certificates, key, _ = map(str, certificate_folder.find(own).all)
    with nghttpx(folder, container, key, certificates) as address:
        yield address


_HAPROXY = """\
global
  log stderr format raw daemon notice
  stats socket {folder}/haproxy.sock
defaults
  mode http
  log global
  timeout connect 10s
  timeout client 1m
  timeout server 1m
frontend service
  bind {address} {front}
  default_backend krun
backend krun
  server krun {container} proto h2
"""


@contextmanager
def haproxy(folder: Path, container: Address, front: str = "") -> Iterator[Address]:
    """HAProxy before krun; `front` is what its `bind` has besides."""
    address = Address("127.0.0.1", free_port())
    file = folder / "haproxy.cfg"
    file.write_text(_HAPROXY.format(folder=folder, address=address, front=front, container=container))
    process = start("haproxy", [find_program("haproxy"), "-W", "-db", "-f", file], folder)
    try:
        process.wait_for(lambda record: "Loading success" in said(record), PATIENCE_S)
        yield address
    finally:
        process.stop()


@contextmanager
def _haproxy(folder: Path, own: Path, container: Address) -> Iterator[Address]:
    certificates, key, _ = certificate_folder.find(own).all
    pem = folder / "haproxy.pem"
    pem.write_bytes(certificates.read_bytes() + key.read_bytes())
    with haproxy(folder, container, f"ssl crt {pem} alpn h2") as address:
        yield address


FRONT_ENDS: dict[str, FrontEnd] = {"nghttpx": _nghttpx, "haproxy": _haproxy, "envoy": envoy_front}


def _krun(container: Address) -> Json:
    return cluster_of("krun", container, typed_extension_protocol_options=HTTP2)
