"""The end of the mesh's mTLS in the container, as the settings have it: Envoy, with or without pilot-agent,
the built-in one, or none. Where the rules are krun's own, inner HBONE ends here, too (`inner_hbone`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agent.config.settings import Settings
from shared.address import Address
from shared.errors import NoRouteError, UnavailableError
from shared.tasks import spawn
from shared.trust.spiffe import SCHEME

if TYPE_CHECKING:
    from agent.mtls.envoy import EnvoyProcess
    from agent.mtls.envoy_admin import EnvoyAdmin
    from agent.mtls.inbound import Inbound
    from agent.mtls.inner_hbone import InnerHbone
    from agent.mtls.pilot_agent import PilotAgent
    from agent.policy.mesh_policies import MeshPolicies
    from agent.proxy.downstream import Caller, Downstream
    from agent.proxy.request_record import Record
    from shared.credentials.kubernetes.kubernetes_access import Access
    from shared.errors import LimitError
    from shared.net.legs.contract import Leg
    from shared.net.legs.stream import Stream
    from shared.net.relay.memory_budget import Holder
    from shared.trust.peer_policy import PeerPolicy

log = logging.getLogger("hbone.agent")

ENVOY_START_TIMEOUT_S = 20.0
"""Envoy is ready within a second on an idle machine; a throttled container takes many times that."""

FILES_OF_BUILTIN = 2
"""Of each connection of the built-in end: the one that it has accepted, and the one to the app."""

ENVOY_STOP_S = 2.0
"""For Envoy to end once all tunnels are over."""


class MtlsEnd:
    """Made by the agent; nothing is open before `start`."""

    def __init__(
        self,
        settings: Settings,
        search_path: str | None,
        finished: Callable[[Record], None],
        refusal: Callable[[], LimitError | None],
        serve: Callable[[Downstream, Caller], None],
        captures: Callable[[str, Path | None], Awaitable[bool]] | None = None,
        access: Access | None = None,
    ) -> None:
        """`search_path` is where Envoy is looked for, as PATH. `finished` gets the record of each
        connection whose bytes are passed on, and of Envoy's requests those that the settings want.
        `refusal()` says why the built-in end accepts no connection now, if so; `serve(request, caller)`
        answers its requests. `captures(kind, pilot_agent)` is called before the end is started: whether its
        Envoy gets what the app connects to; None: it does not. `access` leads to the cluster that MESH names;
        None: it names none."""
        self.address: Address = settings.inbound_listen
        """Where it listens, or whoever else is there; once started with the port in place of 0."""
        self._settings = settings
        self._search_path = search_path
        self._finished = finished
        self._refusal = refusal
        self._captures = captures
        self._serve = serve
        self._access = access
        self._policies: MeshPolicies | None = None
        self._patterns: tuple[Sequence[str], Sequence[str]] | None = None
        self._envoy: EnvoyProcess | None = None
        self._envoy_admin: EnvoyAdmin | None = None
        self._pilot_agent: PilotAgent | None = None
        self._kind = ""
        self._restarts = 0
        self._keeper: asyncio.Task[None] | None = None
        self._inbound: Inbound | None = None
        self._policy: PeerPolicy | None = None
        self._inner: InnerHbone | None = None  # from the first request for it on
        self._most_connections = settings.max_tunnels
        self._draining = False
        self._folder: Path | None = None

    async def start(self) -> None:
        """Returns when it accepts connections. May be cancelled; `close` then ends what has started.

        Raises:
            UnavailableError: a program, a port or a file cannot be had, or the mesh's policies would not be
            enforced; or what `captures` raises.
            ConfigError, DeniedError: a file has not what it should.
        """
        settings = self._settings
        certificates_found = settings.certificates_found()
        binary = pilot_agent = None
        if settings.inbound == "pilot-agent" or (settings.inbound == "auto" and settings.xds is not None):
            from agent.config.pilot_settings import find_program

            pilot_agent = find_program(settings.pilot.program, self._search_path)
        elif settings.inbound == "envoy" or (settings.inbound == "auto" and certificates_found):
            binary = self._find_envoy()
        kind = settings.choose_inbound(
            envoy_found=binary is not None,
            certificates_found=certificates_found,
            pilot_found=pilot_agent is not None,
        )
        if kind == "none" and settings.policy == "apply":
            raise UnavailableError(
                "HBONE_POLICY=apply: krun has no mTLS end that could apply policies: "
                + (
                    "set HBONE_INBOUND=builtin"
                    if settings.inbound == "none"
                    else f"no certificates in {settings.certificates}: set HBONE_CERTS"
                )
            )
        self._kind = kind
        if kind in ("envoy", "builtin"):
            from agent.policy.mesh_policies import MeshPolicies

            self._policies = MeshPolicies(settings, self._access, kind)
            self._settings = await self._policies.start()
        captured = False
        if self._captures is not None:
            captured = await self._captures(kind, pilot_agent if kind == "pilot-agent" else None)
        if kind == "pilot-agent" and pilot_agent is not None:
            await self._start_pilot_agent(pilot_agent, captured)
        elif kind == "envoy" and binary is not None:
            await self._start_envoy(binary)
        elif kind == "builtin":
            await self._start_builtin()
        log.info("mTLS end: %s, target of /_hbone/15003: %s", kind, self.address)
        if self._policies is not None:
            if (text := self._policies.warning(self.address)) is not None:
                log.warning("%s", text)
            self._policies.watch()

    @property
    def connections(self) -> int:
        """Open ones of the built-in end; Envoy's come and go with their tunnels."""
        return 0 if self._inbound is None else self._inbound.connections

    @property
    def files_per_tunnel(self) -> int:
        """How many open files a tunnel to it takes here, that of its other end included; and one more where
        inner HBONE is served, of which there may be as many tunnels to the app again."""
        inner = 1 if self._policy is not None and self._settings.inner.is_on else 0
        return inner + (1 if self._inbound is None else FILES_OF_BUILTIN + 1)

    @property
    def kind(self) -> str:
        """What it is: a value of HBONE_INBOUND, but not `auto`; empty before the start."""
        return self._kind

    @property
    def restarts(self) -> int:
        """How often Envoy, or pilot-agent, has ended by itself."""
        return self._restarts + (0 if self._pilot_agent is None else self._pilot_agent.restarts)

    @property
    def _proxy(self) -> EnvoyProcess | PilotAgent | None:
        """The Envoy that runs, by whom it is run."""
        return self._envoy or self._pilot_agent

    @property
    def unenforced_policies(self) -> Sequence[str]:
        """Of the mesh's policies those that apply to the workload and that it does not enforce."""
        return () if self._policies is None else self._policies.unenforced

    @property
    def allow(self) -> Sequence[str] | None:
        """Patterns of the peers that may come in, those of applied policies included; None: not krun's to
        say."""
        return None if self._patterns is None else self._patterns[0]

    @property
    def deny(self) -> Sequence[str] | None:
        """Patterns of those that may not, whatever `allow` says."""
        return None if self._patterns is None else self._patterns[1]

    async def is_ready(self) -> bool:
        """Whether it accepts connections now, as far as it is ours."""
        return self._proxy is None or await self._proxy.is_ready()

    async def metrics(self) -> bytes:
        """Envoy's in Prometheus' text format; empty without Envoy. Raises HboneError."""
        return b"" if self._proxy is None else await self._proxy.metrics()

    def limit(self, most_connections: int) -> None:
        """Lets the built-in end take so many connections at once, and inner HBONE so many tunnels."""
        self._most_connections = most_connections
        if self._inbound is not None:
            self._inbound.most_connections = most_connections

    def holders(self) -> Iterator[Holder]:
        """All that holds bytes for the peers of the built-in end and of inner HBONE."""
        if self._inbound is not None:
            yield from self._inbound.holders()
        if self._inner is not None:
            yield from self._inner.holders()

    @property
    def inner(self) -> InnerHbone | None:
        """Inner HBONE, once somebody has asked for it."""
        return self._inner

    @property
    def most_inner(self) -> int:
        """How many tunnels of inner HBONE there may be."""
        return self._most_connections

    def hbone_leg(self, stream: Stream) -> Leg:
        """The end of inner HBONE for what comes in the tunnel of `stream`.

        Raises:
            NoRouteError: it is not served here; the text says what to set.
            UnavailableError, ConfigError: the certificates cannot be used.
        """
        if self._inner is None:
            self._inner = self._start_inner()
        return self._inner.leg(stream)

    def is_hbone_at_rest(self, stream: Stream) -> bool:
        """Whether the client in the tunnel of `stream` has had what it wanted, and nothing is open in it."""
        return self._inner is not None and self._inner.is_at_rest(stream)

    async def emptied(self) -> None:
        """Returns when the built-in end has no connection open."""
        if self._inbound is not None:
            await self._inbound.emptied()

    async def drain(self) -> None:
        """Tells clients that speak HTTP, or HBONE, to open nothing new."""
        self._draining = True
        if self._inner is not None:
            self._inner.drain()
        if self._proxy is not None:
            await self._proxy.drain()
        if self._inbound is not None:
            self._inbound.drain()

    async def close(self, left_s: float | None = None) -> None:
        """Ends it with all connections; by force after `left_s` seconds, if it would have more."""
        stop_s = ENVOY_STOP_S if left_s is None else min(ENVOY_STOP_S, left_s)
        if self._policies is not None:
            await self._policies.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._pilot_agent is not None:
            await self._pilot_agent.stop(stop_s)
        if self._inner is not None:
            self._inner.close()
        if self._inbound is not None:
            await self._inbound.close(0)
        if self._envoy_admin is not None:
            await self._envoy_admin.close()
        if self._envoy is not None:
            await self._envoy.stop(stop_s)
        if self._folder is not None:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)

    def _find_envoy(self) -> Path | None:
        """The binary; None without one, or if nobody insists on Envoy and it cannot do what is asked for."""
        from agent.mtls.envoy import find_binary
        from agent.mtls.envoy_names import domains_of_roots

        settings = self._settings
        binary = find_binary(settings.envoy_bin, self._search_path)
        if binary is None:
            return None
        lacks = ""
        if settings.crl is not None:
            lacks = "HBONE_CRL is set, and envoy keeps open connections of revoked peers"
        elif len(domains := domains_of_roots(settings.certificates)) > 1:
            told = f"{settings.certificates} has roots of {', '.join(domains)}"
            lacks = f"{told}, and envoy lets each vouch for all workloads"
        if not lacks:
            return binary
        if settings.inbound == "envoy":
            raise UnavailableError(f"HBONE_INBOUND=envoy: {lacks}: set HBONE_INBOUND=builtin")
        log.info("not envoy: %s", lacks)
        return None

    async def _start_pilot_agent(self, program: Path, captured: bool) -> None:
        from agent.launch.startup import accepts
        from agent.mtls.envoy import find_binary
        from agent.mtls.pilot_agent import PilotAgent

        settings = self._settings
        envoy = find_binary(settings.envoy_bin, self._search_path)
        pilot = replace(settings.pilot, interception="REDIRECT") if captured else settings.pilot
        self._pilot_agent = await PilotAgent.start(program, pilot, envoy, self._search_path)
        await self._pilot_agent.ready(ENVOY_START_TIMEOUT_S)
        if not await accepts(self.address):
            log.warning(
                "istiod has sent Envoy no listener for port %d: a Sidecar in namespace %s has to have an "
                "ingress with this port for workloads with the label app=%s",
                self.address.port,
                settings.pilot.namespace,
                settings.pilot.workload,
            )

    async def _start_envoy(self, binary: Path) -> None:
        import tempfile  # with shutil, without Envoy, 2 ms more to start

        from agent.mtls.envoy import EnvoyProcess
        from agent.mtls.envoy_bootstrap import bootstrap, secrets
        from agent.mtls.envoy_http import HttpSettings
        from agent.mtls.restarts import keep_running

        settings = self._settings
        self._folder = Path(tempfile.mkdtemp(prefix="krun-"))
        policy = self._peer_policy()
        http = HttpSettings(settings.app_protocol, settings.idle_timeout_s, settings.request_log)
        folder = self._folder

        async def start(listen: Address) -> None:
            """Returns once it is ready. Raises UnavailableError; then `_envoy` has to be stopped."""
            self._envoy = await EnvoyProcess.start(
                binary,
                bootstrap(
                    listen=listen,
                    app=settings.app,
                    policy=policy,
                    secrets_folder=folder,
                    connect_timeout_s=settings.dial_timeout_s,
                    http=http,
                ),
                secrets(settings.certificates),
                folder,
                finished=self._finished,
                request_log=settings.request_log,
                drain_s=settings.drain_timeout_s,
            )
            await self._envoy.ready(ENVOY_START_TIMEOUT_S)
            if self._envoy.inbound is not None:
                self.address = self._envoy.inbound

        try:
            await start(settings.inbound_listen)
        except UnavailableError as error:
            saved = self._envoy.save_configuration() if self._envoy is not None else ""
            raise UnavailableError(f"{error}{saved}") from error
        assert self._envoy is not None
        if settings.envoy_admin is not None:
            from agent.mtls.envoy_admin import EnvoyAdmin

            self._envoy_admin = EnvoyAdmin(self._envoy.admin)
            log.info("envoy's admin port on %s", await self._envoy_admin.start(settings.envoy_admin))

        async def start_again() -> None:
            """Where it was. Until then tunnels to it are refused."""
            try:
                await start(self.address)
            except UnavailableError:
                assert self._envoy is not None
                await self._envoy.stop(ENVOY_STOP_S)
                raise
            log.info("envoy is ready again")

        self._keeper = spawn(keep_running(self._envoy_ended, start_again), name="keep envoy running")

    async def _envoy_ended(self) -> str:
        assert self._envoy is not None
        await asyncio.wait({self._envoy.exited})
        self._restarts += 1
        return f"envoy ended with exit code {self._envoy.exited.result()}"

    async def _start_builtin(self) -> None:
        from agent.mtls.inbound import Inbound, InboundSettings
        from shared.net.tls import certificate_folder

        settings = self._settings
        files = certificate_folder.find(settings.certificates)
        inbound_settings = InboundSettings(
            listen=settings.inbound_listen,
            app=settings.app,
            certificates=files.certificates,
            private_key=files.private_key,
            roots=files.roots,
            bundles=files.bundles,
            protocol=settings.app_protocol,
            dial_timeout_s=settings.dial_timeout_s,
            handshake_timeout_s=settings.handshake_timeout_s,
            max_connections=settings.max_tunnels,
            half_closed_timeout_s=settings.half_closed_timeout_s,
            crl=settings.crl,
        )
        self._inbound = Inbound(
            inbound_settings,
            self._peer_policy(),
            self._finished,
            self._refusal,
            self._serve,
        )
        await self._inbound.start()
        self.address = self._inbound.address

    def _start_inner(self) -> InnerHbone:
        """Raises what `hbone_leg` does."""
        settings = self._settings
        if not settings.inner.is_on:
            raise NoRouteError("inner HBONE is not served here: HBONE_INNER=0 of krun says so")
        if self._policy is None:
            raise NoRouteError(f"inner HBONE is not served here: {self._why_no_inner()}")
        from agent.config.own_baggage import own_baggage, own_namespace
        from agent.mtls.inner_hbone import InnerHbone, InnerHboneSettings
        from agent.mtls.own_services import OwnServices, default_host
        from shared.net.tls import certificate_folder

        namespace = own_namespace(settings)
        hosts = settings.inner.hosts or (default_host(settings.pilot.workload, namespace),)
        inner = InnerHbone(
            InnerHboneSettings(
                files=certificate_folder.find(settings.certificates),
                services=OwnServices(hosts, settings.inner.ports(settings.app.port), settings.app),
                baggage=own_baggage(settings, namespace),
                dial_timeout_s=settings.dial_timeout_s,
                handshake_timeout_s=settings.handshake_timeout_s,
                connection_idle_timeout_s=settings.inner.idle_timeout_s or None,
                idle_timeout_s=settings.idle_timeout_s,
                half_closed_timeout_s=settings.half_closed_timeout_s,
                crl=settings.crl,
            ),
            self._policy,
            self._finished,
            self._refusal,
            most_tunnels=lambda: self._most_connections,
        )
        inner.start()
        if self._draining:
            inner.drain()
        log.info("inner HBONE, target of /_hbone/15008: for %s, to the app", ", ".join(hosts))
        return inner

    def _why_no_inner(self) -> str:
        settings = self._settings
        if self._kind == "pilot-agent":
            told = "under pilot-agent Envoy enforces the mesh's policies, and krun does not know them"
            return f"{told}: set HBONE_INBOUND=builtin"
        if not settings.certificates_found():
            return f"krun has no certificates in {settings.certificates}: set HBONE_CERTS or HBONE_CA"
        return "krun has no mTLS end of its own: set HBONE_INBOUND=builtin"

    def _peer_policy(self) -> PeerPolicy:
        """Who may come in: as told, else everybody of our own certificate's trust domain."""
        from agent.config.own_identity import own_trust_domain
        from shared.trust.peer_policy import PeerPolicy

        settings = self._settings
        patterns = settings.allow
        if not patterns and settings.trust_domain:
            patterns = (f"{SCHEME}{settings.trust_domain}/**",)
        patterns = patterns or own_trust_domain(settings.certificates)
        policy = PeerPolicy(patterns, settings.deny, settings.trust(patterns + settings.deny))
        self._patterns, self._policy = (patterns, settings.deny), policy
        log.info("allowed identities: %s", policy)
        return policy
