"""pilot-agent as the mTLS end: Envoy on port 15003 by istiod's configuration and policies.

It is started as Istio's injector would have it, for a pod whose traffic is captured or not, in a folder of
its own that looks like such a pod's: files below var/run/secrets and etc/istio, for its paths are relative.

1. Its certificate is what krun keeps in HBONE_CERTS, if it keeps one; else istiod's CA signs it. To istiod it
   shows its token; without one, the certificate that krun keeps.
2. A Sidecar resource that selects the workload makes Envoy listen on 15003. It is ready (15031, for 15021 is
   krun's) once it has its certificate and istiod's configuration.
3. As root krun starts it as uid 1337, which rules that capture traffic leave alone. Its log is a pipe that
   this user owns, for Envoy opens /dev/stdout anew.
4. When it ends by itself it is started again, after a pause that grows. Until then tunnels are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from agent.config.pilot_settings import UID, PilotSettings, user
from agent.launch.launcher import Child
from agent.mtls.envoy import WORKERS, drain_listeners
from agent.mtls.own_address import own_address
from agent.mtls.restarts import keep_running
from shared import ports
from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE, write_atomically
from shared.errors import HboneError, UnavailableError
from shared.net.http1 import Response, get
from shared.net.tls import certificate_folder
from shared.net.tls.root_files import RootSources
from shared.tasks import spawn

log = logging.getLogger("hbone.pilot_agent")

SERVER_NAME = "istiod.istio-system.svc"
"""What istiod's certificate says, however it is reached."""

READY_URL = f"http://127.0.0.1:{ports.PILOT_HEALTH}/healthz/ready"
METRICS_URL = f"http://127.0.0.1:{ports.PILOT_AGENT}/stats/prometheus"
ADMIN_URL = f"http://127.0.0.1:{ports.ADMIN}"

POLL_S = 0.1
"""Between two questions whether it is ready, each of which it logs."""

DRAIN_S = 1
"""Envoy's own, after the tunnels have drained."""

ANSWER_S = 2.0
ANSWER_BYTES = 64 << 20
"""For one answer on this machine; the whole configuration of a large mesh is tens of MB."""

LAST_WORDS_S = 1.0
"""How long what it wrote before its end may take to arrive."""

DUMP_FILE = "config_dump.json"

_SEVERITIES = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.DEBUG,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
}
_LOG_LINE = re.compile(r"\S+\t(trace|debug|info|warn|warning|error|critical|fatal)\t(.*)")
"""Istio's log: time, level and text, with tabs between them. Envoy's lines are in it, with its own levels."""

_ENVOYS_OWN = re.compile(r"envoy \w+ [\w./-]+:\d+\t|\tthread=\d+$")
"""Around the text of a line of Envoy's: where in its source, and in which thread."""

ISTIOD_ROOTS = "var/run/secrets/istio/root-cert.pem"
KEPT = "var/run/secrets/workload-spiffe-credentials"
TOKEN = "var/run/secrets/tokens/istio-token"
"""Below its folder, where it looks for them."""

OF_FILES, OF_ISTIOD = "GkeWorkloadCertificate", "Citadel"
"""Its names for who signs: somebody who keeps the three files in KEPT, under GKE's names and ours; or
istiod."""

NOT_READY = "Envoy proxy is NOT ready"
"""Said for each time that we ask."""

NO_SIDECAR = (
    "; is there a Sidecar in namespace {namespace} for workloads with the label app={workload}, with egress "
    'to "~/*"? Without one Envoy listens on the port of each Service'
)
"""Where it cannot, and rejects its whole configuration."""


def environment(settings: PilotSettings, folder: Path, envoy: Path | None, address: str) -> dict[str, str]:
    """pilot-agent's environment, without PATH and HOME; `address` is this machine's, `envoy` the binary."""
    proxy = dict(settings.proxy_config or {})
    proxy.setdefault("configPath", str(folder / "etc/istio/proxy"))
    proxy.setdefault("serviceCluster", f"{settings.workload}.{settings.namespace}")
    proxy.setdefault("concurrency", WORKERS)
    proxy.setdefault("statusPort", ports.PILOT_AGENT)
    proxy.setdefault("terminationDrainDuration", f"{DRAIN_S}s")
    if settings.istiod is not None:
        proxy.setdefault("discoveryAddress", str(settings.istiod))
    if envoy is not None:
        proxy.setdefault("binaryPath", str(envoy))
    kept = settings.kept_certificates
    if kept is not None and not settings.token_file.exists():
        own = certificate_folder.written(kept.absolute())
        given = proxy.get("proxyMetadata")
        proxy["proxyMetadata"] = {
            "ISTIO_META_TLS_CLIENT_CERT_CHAIN": str(own.certificates),
            "ISTIO_META_TLS_CLIENT_KEY": str(own.private_key),
            **(given if isinstance(given, dict) else {}),
        }
    return {
        "POD_NAME": settings.pod,
        "POD_NAMESPACE": settings.namespace,
        "INSTANCE_IP": address,
        "SERVICE_ACCOUNT": settings.account,
        "TRUST_DOMAIN": settings.trust_domain,
        "PILOT_CERT_PROVIDER": "istiod",
        "CA_PROVIDER": OF_ISTIOD if kept is None else OF_FILES,
        # With files of others it would look for istiod's root elsewhere.
        **({} if kept is None else {"XDS_ROOT_CA": str(folder / ISTIOD_ROOTS)}),
        "JWT_POLICY": "third-party-jwt",
        "CA_ADDR": str(proxy.get("discoveryAddress", "")),
        "ISTIOD_SAN": SERVER_NAME,
        "ENVOY_STATUS_PORT": str(ports.PILOT_HEALTH),
        "ISTIO_BOOTSTRAP": str(settings.bootstrap),
        "ISTIO_META_CLUSTER_ID": settings.cluster_id,
        "ISTIO_META_INTERCEPTION_MODE": settings.interception,
        "ISTIO_META_WORKLOAD_NAME": settings.workload,
        "ISTIO_META_MESH_ID": settings.trust_domain,
        "ISTIO_META_HTTP_PROXY_PORT": str(ports.HTTP_PROXY),
        "ISTIO_META_POD_PORTS": "[]",
        **settings.passed,
        "PROXY_CONFIG": json.dumps(proxy),
    }


class PilotAgent:
    """A pilot-agent that is kept running, made by `start`."""

    def __init__(
        self, program: Path, settings: PilotSettings, environ: Mapping[str, str], folder: Path
    ) -> None:
        self._program = program
        self._settings = settings
        self._environ = environ
        self._folder = folder
        self._child: Child
        self._session: int | None = None  # of the child, while something of it may be left
        self._log: asyncio.Task[None]
        self._keeper: asyncio.Task[None] | None = None
        self._last_words: dict[int, str] = {}
        """The last text of each level above INFO."""
        self._stopping = False
        self.restarts = 0
        """How often it has ended by itself."""

    @classmethod
    async def start(
        cls, program: Path, settings: PilotSettings, envoy: Path | None, search_path: str | None
    ) -> PilotAgent:
        """Starts `program` with `envoy`, the binary that it is to run (None: its own default), and
        `search_path` as its PATH. It inherits nothing else.

        Raises UnavailableError when it cannot be started, ConfigError when the mesh's roots cannot be used.
        """
        folder = Path(tempfile.mkdtemp(prefix="krun-pilot-"))
        try:
            _lay_out(folder, settings)
            told = environment(settings, folder, envoy, own_address(settings.istiod))
            environ = {"PATH": search_path or os.defpath, "HOME": str(folder), **told}
            agent = cls(program, settings, environ, folder)
            await agent._start()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return agent

    async def ready(self, timeout_s: float) -> None:
        """Waits until Envoy has its certificate and its configuration, and keeps it running from then on.

        Raises UnavailableError with the last that it said: it has ended, or is not ready after `timeout_s`
        seconds; what configuration it has by then is saved.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await self.is_ready():
            if self._child.exited.done():
                raise await self._failure(f"pilot-agent ended: {self._child.end}")
            if loop.time() >= deadline:
                saved = await self._save_configuration()
                raise await self._failure(f"pilot-agent is not ready after {timeout_s:g} s{saved}")
            await asyncio.wait({self._child.exited}, timeout=POLL_S)
        self._keeper = spawn(keep_running(self._ended, self._start), name="keep pilot-agent running")

    async def drain(self) -> None:
        """As `drain_listeners`."""
        await drain_listeners(ADMIN_URL)

    async def metrics(self) -> bytes:
        """Its metrics and Envoy's, in Prometheus' text format. Raises HboneError."""
        return (await self._get(METRICS_URL)).body

    async def stop(self, grace_s: float) -> None:
        """Ends it with Envoy, by force when it takes more than `grace_s` seconds."""
        self._stopping = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self._child.stop(grace_s)
        self._end_session()
        await asyncio.wait({self._log}, timeout=LAST_WORDS_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    # Running.

    async def _start(self) -> None:
        reader, writer = os.pipe()
        owner = user()
        try:
            if owner is not None:
                with contextlib.suppress(OSError):  # then Envoy's access log is lost, and nothing else
                    os.fchown(writer, *owner)
            process = await asyncio.create_subprocess_exec(
                *(str(self._program), "proxy", "sidecar"),
                *("--domain", f"{self._settings.namespace}.svc.cluster.local"),
                f"--proxyLogLevel={self._settings.log_level}",
                cwd=self._folder,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                # No terminal's signal reaches it: tunnels are to drain before it ends.
                start_new_session=True,
                preexec_fn=None if owner is None else _become_user,
            )
        except BaseException as error:
            os.close(reader)
            if isinstance(error, OSError):
                raise UnavailableError(f"cannot start pilot-agent: {error.strerror or error}") from error
            raise
        finally:
            os.close(writer)
        self._child = Child("pilot-agent", process)
        self._session = process.pid
        self._log = spawn(self._forward_log(reader), name="pilot-agent's log")

    async def _ended(self) -> str:
        await self._child.wait()
        self.restarts += 1
        self._end_session()
        return f"pilot-agent has ended: {self._child.end}"

    def _end_session(self) -> None:
        """Kills what it has left behind: an Envoy would keep the ports of the next one. Once only, for the
        number may be another's later."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

    async def is_ready(self) -> bool:
        """Whether Envoy has its certificate and its configuration."""
        try:
            return (await self._get(READY_URL)).status == 200
        except HboneError:  # not listening yet
            return False

    async def _get(self, url: str) -> Response:
        return await get(url, headers={}, timeout_s=ANSWER_S, max_bytes=ANSWER_BYTES)

    async def _save_configuration(self) -> str:
        """Where the configuration is now, as the end of a message; empty if Envoy does not tell it."""
        try:
            dump = (await self._get(f"{ADMIN_URL}/config_dump")).body
            path = Path(tempfile.mkdtemp(prefix="krun-")) / DUMP_FILE
            write_atomically(path, dump, PRIVATE_MODE)
        except (HboneError, OSError):
            return ""
        return f"; its configuration is in {path}"

    # Its log.

    async def _forward_log(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            while line := await _line(reader):
                self._log_line(line.decode("utf-8", "replace").rstrip())
        finally:
            transport.close()

    def _log_line(self, line: str) -> None:
        match = _LOG_LINE.fullmatch(line)
        if match is None:
            # Lines of Envoy's access log, else what settings it has.
            level, text = logging.INFO if line.startswith("[") else logging.DEBUG, line
        else:
            level = _SEVERITIES.get(match[1], logging.ERROR)
            text = _ENVOYS_OWN.sub("", match[2]).replace("\t", ": ")
        if text.startswith(NOT_READY):
            level = logging.DEBUG
        if level >= logging.WARNING:
            self._last_words[level] = text
        log.log(logging.DEBUG if self._stopping else level, "%s", text)

    async def _failure(self, what: str) -> UnavailableError:
        if self._child.exited.done():
            await asyncio.wait({self._log}, timeout=LAST_WORDS_S)
        text = self._last_words.get(logging.ERROR) or self._last_words.get(logging.WARNING)
        hint = ""
        if text is not None and "cannot bind" in text:
            hint = NO_SIDECAR.format(namespace=self._settings.namespace, workload=self._settings.workload)
        return UnavailableError(f"{what}: {text}{hint}" if text else what)


def _become_user() -> None:
    """In the child, before it executes the program."""
    os.setgroups(())
    os.setgid(UID)
    os.setuid(UID)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line that is not longer than the reader's limit; b"" at the end."""
    while True:
        try:
            return await reader.readline()
        except ValueError:
            continue  # the reader has dropped it


def _lay_out(folder: Path, settings: PilotSettings) -> None:
    """The files that kubelet mounts into a pod with a sidecar. Raises UnavailableError, ConfigError."""
    roots = RootSources(settings.roots, settings.root_files).read()
    kept = settings.kept_certificates
    if not roots and kept is not None:
        roots = RootSources(files=(certificate_folder.written(kept).roots,)).read()  # those that the CA names
    if not roots:
        raise UnavailableError(
            "pilot-agent needs the mesh's roots to trust istiod: set HBONE_ROOTS or CAROOT_ISTIOD"
        )
    try:
        for part in ("etc/istio/proxy", "etc/istio/pod", "var/run/secrets/istio", "var/run/secrets/tokens"):
            (folder / part).mkdir(parents=True)
        write_atomically(folder / ISTIOD_ROOTS, roots, PUBLIC_MODE)
        told = "".join(f"{name}={json.dumps(value)}\n" for name, value in settings.labels.items())
        write_atomically(folder / "etc/istio/pod/labels", told.encode(), PUBLIC_MODE)
        (folder / TOKEN).symlink_to(settings.token_file)
        if kept is not None:
            (folder / KEPT).symlink_to(kept.absolute())
        if (owner := user()) is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, *owner, follow_symlinks=False)
    except OSError as error:
        raise UnavailableError(f"pilot-agent's folder {folder} cannot be made: {error.strerror}") from error
