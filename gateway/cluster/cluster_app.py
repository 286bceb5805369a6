"""`hgate cluster`: the process at the API server, beside those with the tunnels.

It follows Services, ServiceEntries and, if `cluster.allow` lets anybody reach Services, EndpointSlices; hands
routes and endpoints over as files (`gateway.config.cluster_files`); and, if it holds the Lease, tells each
object what became of it. It alone needs access to the API server; what a gateway with tunnels knows of the
cluster is in the two files, which stay when this process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cluster import mesh_env
from gateway.cluster.api_server import ApiServer
from gateway.cluster.leadership import Leadership
from gateway.cluster.mesh_env import MeshEnv
from gateway.cluster.object_status import ObjectStatus, Status
from gateway.cluster.object_watch import Key, Kind, ObjectWatch
from gateway.cluster.registrar import Registrar
from gateway.cluster.service_addresses import addresses_of, cluster_ips
from gateway.cluster.service_endpoints import EndpointSlice, ServiceEndpoints, ports_of
from gateway.cluster.service_routes import ObjectName, ServiceRoutes, is_asked_for, name_of
from gateway.config import cluster_files
from gateway.config.cluster_settings import ClusterSettings
from gateway.config.config import GatewayConfig
from gateway.config.reload import ConfigFile, Reloads, keep_fixed, log_warnings
from gateway.ops.versions import log_versions
from gateway.rules.cluster_rules import ServiceRoute
from gateway.rules.routes import RouteTable
from shared import ports
from shared.address import Address
from shared.cluster.service_annotations import PREFIX, REFUSED, STATUS
from shared.config.fields import Environment
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import EXIT_INTERNAL, EXIT_OK, ConfigError, UnavailableError
from shared.name_globs import compile_glob
from shared.ops import families, metrics
from shared.ops.http_server import HttpServer, Request, Response
from shared.ops.port_metrics import port_families
from shared.ops.readiness import Readiness
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.cluster")

SERVICES = Kind("Service", "v1", "services")
SERVICE_ENTRIES = Kind("ServiceEntry", "networking.istio.io/v1", "serviceentries", is_optional=True)
SLICES = Kind("EndpointSlice", "discovery.k8s.io/v1", "endpointslices")

ROUTES_PAUSE_S = 0.1
"""Between a change and the list with it, so that several changes make one list."""

LIST_PAUSE_S = 1.0
"""Between two lists: many changes are gathered for so long."""

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "istio-system"
"""Of the Lease, where neither POD_NAMESPACE nor the pod's service account says it."""

LEASE_NAME = "hgate"


class ClusterProcess:
    """The running process."""

    def __init__(self, config_file: Path, environ: Mapping[str, str]) -> None:
        """Raises ConfigError if the file has a mistake, or no section `cluster`."""
        file = ConfigFile(config_file, with_cluster=False)
        self._config = file.read()
        self._settings = _settings(self._config, config_file)
        self._environ = environ
        self._reloads = Reloads(file, self._apply)
        self._config_file = config_file
        self._stop = asyncio.Event()
        self._code = EXIT_OK
        self.readiness = Readiness()
        self._is_up = False
        self._watches: dict[str, ObjectWatch[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._api: ApiServer | None = None
        self._status: ObjectStatus | None = None
        self._leadership: Leadership | None = None
        self._mesh_env: MeshEnv | None = None
        self._registrar: Registrar | None = None

        self._routes_asked, self._endpoints_asked = asyncio.Event(), asyncio.Event()
        self._routes: list[ServiceRoute] | None = None  # as they were handed over last
        self._addresses: dict[str, str] = {}  # likewise
        self._addresses_left_out = 0
        self._made = ServiceRoutes()
        self._refused: dict[ObjectName, str] = {}
        self._endpoints = ServiceEndpoints(self._settings.domain)
        self._slices: dict[Key, dict[str, EndpointSlice]] = {}  # by Service, then by name
        self._slice_owners: dict[Key, Key] = {}
        self._dirty: set[Key] = set()
        self._handovers: Counter[tuple[str, str]] = Counter()
        self._said_unwritable = False

        self._ops = HttpServer(
            {
                ("GET", "/metrics"): self._scrape,
                ("GET", "/healthz/ready"): self.readiness.healthz,
                ("GET", "/healthz/live"): lambda _: Response.text(200, "alive"),
            },
            name="cluster",
        )

    async def run(self) -> int:
        """Follows the cluster until a signal ends it; returns the exit code.

        Raises:
            UnavailableError: the port cannot be had, or there is no access to the API server.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reloads.request)
        log_warnings(self._config)
        cluster_files.clean(self._settings.folder)
        self._api = api = await ApiServer.connected(self._environ)
        try:
            log.info("cluster on %s", await self._ops.start(self._settings.ops))
            log_versions()
            self._start(api)
            self._reloads.watch()
            await self._stop.wait()
        finally:
            self._reloads.close()
            for task in self._tasks:
                task.cancel()
            if self._leadership is not None:
                await self._leadership.release()
            await self._ops.close()
            await api.close()
        return self._code

    def _start(self, api: ApiServer) -> None:
        identity = f"{self._environ.get('POD_NAME') or os.uname().nodename}-{secrets.token_hex(4)}"
        self._leadership = Leadership(api, self._namespace(), LEASE_NAME, identity, self._leads)
        kinds = {kind.name: kind for kind in (SERVICES, SERVICE_ENTRIES)}
        self._status = ObjectStatus(api, kinds, self._may_write, identity)
        if self._settings.mesh_env:
            given = Environment(self._environ).given(TokenSettings)
            host = replace(self._config.tokens, **given).metadata_host
            self._mesh_env = MeshEnv(api, host, self._load_balancer, self._may_write)
            self._spawn(self._mesh_env.run(), "keep mesh-env")
        if self._settings.register:
            self._registrar = Registrar(api, self._settings.domain, self._routes_asked.set, self._ended)
        self._follow(SERVICES, _asking_or_ported, self._service_changed)
        self._follow(SERVICE_ENTRIES, _asking, lambda _: self._routes_asked.set())
        self._follow_endpoints()
        self._spawn(self._hand_over_routes(), "hand over routes")
        self._spawn(self._hand_over_endpoints(), "hand over endpoints")
        self._spawn(self._leadership.run(), "seek the lease")
        self._spawn(self._status.run(), "tell objects")
        self._is_up = True

    def _spawn(self, work: Any, name: str) -> None:
        task = spawn(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """None of them ends by itself: after a fault of ours the container is to be started again."""
        if not task.cancelled():
            self._code = EXIT_INTERNAL
            self._stop.set()

    def _follow(
        self,
        kind: Kind,
        keep: Callable[[Mapping[str, Any]], Any],
        changed: Callable[[Key], None],
    ) -> None:
        assert self._api is not None
        # A kind that a reload adds takes no pod out of rotation: what is known is handed over as before.
        waits = None if self._is_up else self.readiness.task(f"list of {kind.plural}")

        def listed() -> None:
            if waits is not None:
                waits.done()
            self._routes_asked.set()
            self._endpoints_asked.set()

        watch = ObjectWatch(self._api, kind, keep, changed, listed)
        self._watches[kind.plural] = watch
        self._spawn(watch.run(), f"follow {kind.plural}")

    def _follow_endpoints(self) -> None:
        """Follows EndpointSlices from when a rule lets Services be reached."""
        if SLICES.plural not in self._watches and any(rule.services for rule in self._settings.allow):
            if (services := self._watches.get(SERVICES.plural)) is not None:
                self._dirty |= services.objects.keys()
            self._follow(SLICES, EndpointSlice.of, self._slice_changed)

    def _namespace(self) -> str:
        if told := self._environ.get("POD_NAMESPACE"):
            return told
        try:
            return NAMESPACE_FILE.read_text().strip()
        except OSError:
            return DEFAULT_NAMESPACE

    async def _apply(self, config: GatewayConfig) -> None:
        _settings(config, self._config_file)  # a file without the section changes nothing
        self._config = keep_fixed(self._config, config)
        self._settings = _settings(self._config, self._config_file)
        self._follow_endpoints()
        self._dirty |= self._watches[SERVICES.plural].objects.keys()
        self._routes_asked.set()
        self._endpoints_asked.set()

    # Routes.

    async def _hand_over_routes(self) -> None:
        loop = asyncio.get_running_loop()
        handed_over = 0.0
        while True:
            await self._routes_asked.wait()
            await asyncio.sleep(max(ROUTES_PAUSE_S, handed_over + LIST_PAUSE_S - loop.time()))
            self._routes_asked.clear()
            watches = [self._watches[kind.plural] for kind in (SERVICES, SERVICE_ENTRIES)]
            if not all(watch.is_complete for watch in watches):
                continue
            objects = [kept for watch in watches for kept in watch.objects.values()]
            of_file = RouteTable(self._config.routes)
            allow, domain = self._settings.allow, self._settings.domain
            routes, self._refused = self._made.table(objects, allow, domain, of_file)
            self._register()
            self._tell(objects, routes)
            self._hand_over_addresses(of_file, routes)
            if routes == self._routes:
                continue
            if self._write("routes", partial(cluster_files.write_routes, self._settings.folder, routes)):
                log.info("%d routes from objects, %d objects refused", len(routes), len(self._refused))
                self._routes = routes
            handed_over = loop.time()

    def _hand_over_addresses(self, of_file: RouteTable, routes: list[ServiceRoute]) -> None:
        """Those of Services that a route takes CONNECTs for."""
        services = self._watches[SERVICES.plural].objects.values()
        own = {route.host for route in routes if route.inner}
        found, left_out = addresses_of(
            services, self._settings.domain, lambda host: host in own or of_file.takes_connect(host)
        )
        if left_out and not self._addresses_left_out:
            log.warning(
                "cluster: %d addresses of Services have no room in the list of %d: clients that ask for them "
                "have to forward the name",
                left_out,
                len(found),
            )
        self._addresses_left_out = left_out
        write = partial(cluster_files.write_addresses, self._settings.folder, found)
        if found != self._addresses and self._write("addresses", write):
            self._addresses = found

    def _register(self) -> None:
        """Has the Services registered that are routed."""
        if self._registrar is None:
            return
        found = self._watches[SERVICES.plural].objects
        routed = {
            key: each
            for key, each in found.items()
            if is_asked_for(each) and name_of(each) not in self._refused
        }
        self._registrar.want(routed, self._gateways())

    def _gateways(self) -> tuple[Address, ...]:
        """Where clients of the mesh find hgate."""
        if self._settings.gateway:
            return self._settings.gateway
        inside = self._of_own_service(mesh_env.INSIDE, "balancer")
        own = self._of_own_service(mesh_env.OUTSIDE, "clusterIP")
        for host in (inside, own):
            address = Address(host, ports.SNI)
            if host and address.is_ip:
                return (address,)
        return ()

    def _tell(self, objects: list[Mapping[str, Any]], routes: list[ServiceRoute]) -> None:
        """What each object is told that has not been told it yet."""
        assert self._status is not None
        urls = {route.source: route.url for route in routes if not route.inner}
        told: dict[ObjectName, Status] = {}
        for found in objects:
            name, about = name_of(found), found["metadata"]
            if not is_asked_for(found):
                text = ""
            elif name in self._refused:
                text = f"{REFUSED}{self._refused[name]}"
            else:
                text = f"routed to {urls.get(str(name), 'nothing: it has no hosts')}"
                text += self._obstacles(name)
            if text != (about.get("annotations") or {}).get(STATUS, ""):
                told[name] = Status(text, text.startswith("routed"), about["uid"], about["resourceVersion"])
        self._status.want(told)

    def _obstacles(self, name: ObjectName) -> str:
        """What could not be registered for an object."""
        if self._registrar is None or name.kind != SERVICES.name:
            return ""
        told = self._registrar.obstacles.get((name.namespace, name.name))
        return f"; not registered: {told}" if told else ""

    # Endpoints.

    async def _hand_over_endpoints(self) -> None:
        changed = True  # so that what is left of another time is replaced
        while True:
            await self._endpoints_asked.wait()
            await asyncio.sleep(LIST_PAUSE_S)
            self._endpoints_asked.clear()
            slices = self._watches.get(SLICES.plural)
            if slices is None or not (slices.is_complete and self._watches[SERVICES.plural].is_complete):
                continue
            dirty, self._dirty = self._dirty, set()
            for key in dirty:
                changed |= self._endpoints.update(key, self._ports(key), self._slices.get(key, {}).values())
            write = partial(cluster_files.write_endpoints, self._settings.folder, self._endpoints.table)
            if changed and self._write("endpoints", write):
                changed = False

    def _ports(self, key: Key) -> Mapping[str, int] | None:
        """Those of a Service that may be reached."""
        namespace, name = key
        found = self._watches[SERVICES.plural].objects.get(key)
        if found is None:
            return None
        for rule in self._settings.allow:
            if rule.matches(namespace) and any(compile_glob(glob).fullmatch(name) for glob in rule.services):
                return ports_of(found)
        return None

    def _service_changed(self, key: Key) -> None:
        if SLICES.plural in self._watches:
            self._dirty.add(key)
        self._routes_asked.set()
        self._endpoints_asked.set()
        if self._mesh_env is not None and key[1] in mesh_env.SERVICES:
            self._mesh_env.wake()

    def _load_balancer(self, name: str) -> str:
        """The address of the load balancer of one of the gateway's Services; empty if it has none yet."""
        return self._of_own_service(name, "balancer")

    def _of_own_service(self, name: str, field: str) -> str:
        found = self._watches[SERVICES.plural].objects.get((self._namespace(), name))
        return "" if found is None else str(found[field])

    def _slice_changed(self, key: Key) -> None:
        before = self._slice_owners.pop(key, None)
        if before is not None:
            of_service = self._slices[before]
            del of_service[key[1]]
            if not of_service:
                del self._slices[before]
            self._dirty.add(before)
        found = self._watches[SLICES.plural].objects.get(key)
        if found is not None:
            service = key[0], found.service
            self._slices.setdefault(service, {})[key[1]] = found
            self._slice_owners[key] = service
            self._dirty.add(service)
        self._endpoints_asked.set()

    def _write(self, what: str, write: Callable[[], None]) -> bool:
        """Whether a list could be written; if not, it is tried again."""
        try:
            write()
        except UnavailableError as error:
            if not self._said_unwritable:
                log.error("%s", error)
            self._said_unwritable = True
            self._handovers[what, "failure"] += 1
            asked = self._endpoints_asked if what == "endpoints" else self._routes_asked
            asyncio.get_running_loop().call_later(LIST_PAUSE_S, asked.set)
            return False
        self._said_unwritable = False
        self._handovers[what, "success"] += 1
        return True

    # The Lease, and what operators see.

    def _may_write(self) -> bool:
        return self._leadership is not None and self._leadership.is_held

    def _leads(self, held: bool) -> None:
        if held:
            self._routes_asked.set()  # which tells objects what became of them
            if self._mesh_env is not None:
                self._mesh_env.wake()
        if self._registrar is not None:
            if held:
                self._registrar.start()
            else:
                self._registrar.stop()

    def _scrape(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        content_type, body = metrics.render(metrics.Scrape(self._families), accept)
        return Response(200, content_type, body)

    def _families(self) -> Iterator[Metric]:
        watches = self._watches
        yield families.CLUSTER_OBJECTS.metric((name, len(one.objects)) for name, one in watches.items())
        yield families.CLUSTER_FOLLOWED.metric((name, one.is_followed) for name, one in watches.items())
        yield families.CLUSTER_EVENTS.metric((name, one.events) for name, one in watches.items())
        yield families.CLUSTER_LISTS.metric((name, one.lists) for name, one in watches.items())
        yield families.CLUSTER_FAILURES.metric(
            (name, status, count) for name, one in watches.items() for status, count in one.failures.items()
        )
        yield families.CLUSTER_ROUTES.value(len(self._routes or ()))
        yield families.CLUSTER_REFUSED.value(len(self._refused))
        yield families.CLUSTER_SERVICES.value(len(self._endpoints.table))
        yield families.CLUSTER_ADDRESSES.metric(
            (("listed", len(self._addresses)), ("left_out", self._addresses_left_out))
        )
        yield families.CLUSTER_HANDOVERS.metric((*key, count) for key, count in self._handovers.items())
        yield families.CLUSTER_LEADER.value(self._may_write())
        yield families.CLUSTER_WRITES.metric(
            (what, result, count)
            for what, writer in (
                ("status", self._status),
                ("mesh-env", self._mesh_env),
                ("registration", self._registrar),
            )
            if writer is not None
            for result, count in (("success", writer.written), ("failure", writer.failed))
        )
        yield from self._reloads.families()
        yield from port_families((self._ops,))


def _settings(config: GatewayConfig, file: Path) -> ClusterSettings:
    if config.cluster is None:
        raise ConfigError(str(file), None, "cluster", "is missing: hgate cluster needs this section")
    return config.cluster


def _asking(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is kept of an object that asks for a route, or did: None of others."""
    about = found["metadata"]
    annotations = {
        key: value for key, value in (about.get("annotations") or {}).items() if key.startswith(PREFIX)
    }
    if not annotations and not is_asked_for(found):
        return None
    if about.get("deletionTimestamp"):
        return None
    kept = {
        key: about[key] for key in ("name", "namespace", "uid", "creationTimestamp", "labels") if key in about
    }
    spec = found.get("spec") or {}
    needed = ("hosts", "ports", "selector", "type", "clusterIP")
    return {
        "kind": found["kind"],
        "metadata": {**kept, "annotations": annotations, "resourceVersion": about["resourceVersion"]},
        "spec": {key: spec[key] for key in needed if key in spec},
    }


def _asking_or_ported(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same of a Service; of one that asks for nothing its ports are kept, and of all where they are
    reached."""
    given = ((found.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
    reached = {
        "balancer": str(given[0].get("ip") or given[0].get("hostname") or ""),
        "clusterIP": str(found["spec"].get("clusterIP") or ""),
        "clusterIPs": cluster_ips(found),
    }
    asking = _asking(found)
    if asking is not None:
        return {**asking, **reached}
    about = found["metadata"]
    return {
        "kind": found["kind"],
        "metadata": {key: about[key] for key in ("name", "namespace")},
        "spec": {"ports": found["spec"].get("ports") or []},
        **reached,
    }
