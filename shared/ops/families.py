"""Every metric of the project, declared once: its name, kind, help and labels.

It does not import prometheus_client, so that whoever names a metric costs a start nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from shared.errors import TOKEN_REASONS
from shared.ops import local_requests, pool_counts

if TYPE_CHECKING:
    from prometheus_client import Metric

Row = tuple[str | float, ...]
"""The values of the labels, then the number."""


class Kind(StrEnum):
    """What Prometheus calls a metric's type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with all its samples. A counter's samples have `_total` behind `name`."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, str | tuple[str, ...]]
    """What the values of each label are: a description, or the closed set."""

    @property
    def shown_name(self) -> str:
        """As it is in a scrape and in queries."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    def metric(self, rows: Iterable[Row]) -> Metric:
        """With a sample for each row."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.help, labels=tuple(self.labels))
        for *values, number in rows:
            family.add_metric([str(value) for value in values], float(number))
        return family

    def value(self, number: float) -> Metric:
        """With one sample, of a metric without labels."""
        return self.metric([(number,)])


FAMILIES: list[Family] = []
"""All of them, in the order of the reference."""


def _family(name: str, kind: Kind, help: str, labels: Mapping[str, str | tuple[str, ...]]) -> Family:
    family = Family(name, kind, help, labels)
    FAMILIES.append(family)
    return family


def _counter(name: str, help: str, **labels: str | tuple[str, ...]) -> Family:
    return _family(name, Kind.COUNTER, help, labels)


def _gauge(name: str, help: str, **labels: str | tuple[str, ...]) -> Family:
    return _family(name, Kind.GAUGE, help, labels)


_ROUTE = (
    "the route's host; at krun: the tunnel's target, 15003, 15008, 22 or NAME, listen/PORT, accepted/PORT; "
    "`hbone`: a CONNECT; the app's own tunnels: egress/local, egress/connect, egress/socks, egress/request"
)
_ORIGIN = "URL of the origin"
_FLAGS = "a response flag"
_IDENTITY = "whose token it is"
_AUDIENCE = "whom it is for"
_RESULT = ("success", "failure")
_PLACE = ("hbone", "reverse", "routes")
_PORT = ("admin", "metrics", "health")
_REPORTER = ("source", "destination")

# Tunnels.

TUNNELS_OPENED = _counter("hbone_tunnels_opened", "Tunnels opened.", route=_ROUTE)
TUNNELS_CLOSED = _counter(
    "hbone_tunnels_closed", "Tunnels ended, by response flag.", route=_ROUTE, flags=_FLAGS
)
TUNNELS_OPEN = _gauge("hbone_tunnels_open", "Tunnels that are open now.", route=_ROUTE)
SENT_BYTES = _counter("hbone_sent_bytes", "Bytes carried towards the service.", route=_ROUTE)
RECEIVED_BYTES = _counter("hbone_received_bytes", "Bytes carried from the service.", route=_ROUTE)
TUNNEL_SETUP = _family(
    "hbone_tunnel_setup_seconds",
    Kind.HISTOGRAM,
    "Seconds from the client's first byte to the open tunnel.",
    {},
)
RETRIES = _counter(
    "hbone_upstream_retries",
    "Tunnel requests sent again, by the failure of the attempt before.",
    route=_ROUTE,
    reason=("refused", "connection_lost", "token", "connect", "no_answer", "429", "502", "503", "504"),
)
RETRIES_OVER_BUDGET = _counter(
    "hbone_upstream_retries_over_budget",
    "Tunnel requests not sent again, because too many requests were retries.",
    route=_ROUTE,
)
CONNECTIONS_REFUSED = _counter(
    "hbone_connections_refused",
    "Connections turned away before they had a tunnel, by response flag.",
    flags=_FLAGS,
)

# Limits.

LIMIT_REFUSALS = _counter(
    "hbone_limit_refusals",
    "Connections and tunnels turned away with the flag LIMIT, by the limit.",
    limit="the setting's name; `descriptors`: the process may open no more files",
)
CONNECTIONS_OPEN = _gauge("hbone_connections_open", "Downstream connections, from accept to end.")
CONNECTIONS_LIMIT = _gauge("hbone_connections_limit", "Downstream connections that may be open.")
SOURCE_CONNECTIONS_MAX = _gauge(
    "hbone_source_connections_max",
    "Downstream connections of the address that has most; of several workers the sum.",
)
SOURCE_CONNECTIONS_LIMIT = _gauge(
    "hbone_source_connections_limit",
    "Downstream connections that one address may have; of several workers the sum.",
)
ROUTE_CONNECTIONS = _gauge(
    "hbone_route_connections", "Connections on a route, from its choice to their end.", route=_ROUTE
)
ROUTE_CONNECTIONS_LIMIT = _gauge(
    "hbone_route_connections_limit", "Connections that a route may have.", route=_ROUTE
)
TUNNELS_OPENING = _gauge(
    "hbone_tunnels_opening",
    "hgate: tunnels that are asked for and not open yet, for a service's autoscaler.",
    route=_ROUTE,
)
TUNNELS_STARTING = _gauge(
    "hbone_tunnels_starting", "Of those, tunnels that wait for a service to start.", route=_ROUTE
)
TUNNELS_STARTING_LIMIT = _gauge(
    "hbone_tunnels_starting_limit", "Tunnels that may wait for one service to start."
)
BUFFERED_BYTES = _gauge("hbone_buffered_bytes", "Bytes held for all peers, when last measured.")
BUFFERED_BYTES_LIMIT = _gauge("hbone_buffered_bytes_limit", "Bytes that may be held; 0: no bound.")
WINDOW_GROWTH_BYTES = _gauge(
    "hbone_window_growth_bytes", "Bytes by which the receive windows of tunnels have grown, all together."
)
WINDOW_GROWTH_BYTES_LIMIT = _gauge(
    "hbone_window_growth_bytes_limit", "Bytes by which they may grow; 0 while much is held."
)
SPLICE_PIPES = _gauge(
    "hbone_splice_pipes", "Pipes that hold bytes of forwarded connections whose far side is slow."
)
SPLICE_PIPES_LIMIT = _gauge("hbone_splice_pipes_limit", "Such pipes that there may be at once.")

# Connections to origins.

UPSTREAM_CONNECTIONS = _gauge(
    "hbone_upstream_connections", "HTTP/2 connections that are open now.", origin=_ORIGIN
)
UPSTREAM_CONNECTIONS_OPENED = _counter(
    "hbone_upstream_connections_opened", "HTTP/2 connections opened.", origin=_ORIGIN
)
UPSTREAM_CONNECTIONS_CLOSED = _counter(
    "hbone_upstream_connections_closed",
    "HTTP/2 connections ended, by the reason why they accepted no new streams.",
    origin=_ORIGIN,
    reason=pool_counts.REASONS,
)
UPSTREAM_CONNECTIONS_DRAINING = _gauge(
    "hbone_upstream_connections_draining",
    "HTTP/2 connections that are open and accept no new streams.",
    origin=_ORIGIN,
)
UPSTREAM_DIALS_FAILED = _counter(
    "hbone_upstream_dials_failed",
    "Connections that could not be made, or ended before the peer's SETTINGS.",
    origin=_ORIGIN,
)
UPSTREAM_WAITING = _gauge(
    "hbone_upstream_waiting", "Tunnels that wait for a connection, or for room on one.", origin=_ORIGIN
)
UPSTREAM_WAITING_LIMIT = _gauge(
    "hbone_upstream_waiting_limit", "Tunnels that may wait for connections to one origin."
)
UPSTREAM_WAITING_REFUSED = _counter(
    "hbone_upstream_waiting_refused", "Tunnels refused because too many waited already.", origin=_ORIGIN
)

# Credentials.

TOKEN_AGE = _gauge(
    "hbone_token_age_seconds",
    "Age of the token; of several workers the greatest.",
    identity=_IDENTITY,
    audience=_AUDIENCE,
)
TOKEN_EXPIRY = _gauge(
    "hbone_token_expiry_timestamp_seconds",
    "When the token ends, in seconds since 1970; of several workers the earliest.",
    identity=_IDENTITY,
    audience=_AUDIENCE,
)
TOKEN_REFRESHES = _counter(
    "hbone_token_refreshes",
    "Attempts to get a new token, or to read one from a file.",
    identity=_IDENTITY,
    audience=_AUDIENCE,
    result=_RESULT,
)
TOKEN_FAILURES = _counter(
    "hbone_token_failures",
    "Tokens that could not be had, or (`rejected`) that the far side did not accept.",
    identity=_IDENTITY,
    audience=_AUDIENCE,
    reason=TOKEN_REASONS,
)
TOKEN_ENTRIES = _gauge("hbone_token_entries", "Minted tokens that are kept, without the new ones.")
TOKEN_ENTRIES_LIMIT = _gauge("hbone_token_entries_limit", "Minted tokens that may be kept.")
TOKEN_NEW_ENTRIES = _gauge(
    "hbone_token_new_entries",
    "Minted tokens that are kept for audiences that a client has chosen and no service has accepted yet.",
)
TOKEN_NEW_ENTRIES_LIMIT = _gauge("hbone_token_new_entries_limit", "Such tokens that may be kept.")
NEW_AUDIENCES_LEFT = _gauge(
    "hbone_new_audiences_left",
    "Tokens for new audiences that may be asked for now; 0 without a bound as well.",
)
NEW_AUDIENCES_LIMIT = _gauge(
    "hbone_new_audiences_limit", "Tokens for new audiences that may be asked for in a minute; 0: no bound."
)
CERTIFICATE_EXPIRY = _gauge(
    "hbone_certificate_expiration_timestamp_seconds",
    "When the first of the certificates in the chain in use ends, in seconds since 1970; of several workers "
    "the earliest.",
    certificate="`hbone`, `reverse` or `identity FOLDER`",
)
CERTIFICATE_START = _gauge(
    "hbone_certificate_start_timestamp_seconds",
    "When that certificate's life began, in seconds since 1970: the part of it that is left says whether a "
    "renewal is overdue.",
    certificate="as above",
)
JWT_CHECKS = _counter(
    "hbone_jwt_checks",
    "Tokens checked because a rule of the HBONE port asks for one. Whether the claims then match a rule is "
    "not counted here.",
    result=(
        "good",
        "missing",
        "malformed",
        "unknown_key",
        "signature",
        "time",
        "audience",
        "issuer",
        "no_keys",
    ),
)
JWT_KEY_FETCHES = _counter(
    "hbone_jwt_key_fetches", "Times that an issuer's keys were read, or could not be.", result=_RESULT
)
CRL_REJECTIONS = _counter("istio_crl_policy_rejections", "Peers refused as revoked.", reporter=_REPORTER)
CRL_CONNECTIONS_ENDED = _counter(
    "hbone_crl_connections_ended", "Open connections ended because their peer was revoked.", place=_PLACE
)
CRL_READ_FAILURES = _counter(
    "hbone_crl_read_failures", "Times that changed revocation lists could not be used.", place=_PLACE
)
CRL_NEXT_UPDATE = _gauge(
    "hbone_crl_next_update_timestamp_seconds",
    "When the first of the revocation lists is overdue, in seconds since 1970.",
    place=_PLACE,
)

# The HBONE port and the reverse port.

LISTENER_CONNECTIONS = _gauge(
    "hbone_listener_connections_open", "Connections to the HBONE port, handshakes included."
)
LISTENER_CONNECTIONS_LIMIT = _gauge(
    "hbone_listener_connections_limit", "Connections that the HBONE port may have."
)
LISTENER_FRONT_CONNECTIONS = _gauge(
    "hbone_listener_front_end_connections_open",
    "Connections of front ends that bring members to the HBONE port by POST; "
    "hbone_listener_connections_limit is their limit, too.",
)
LISTENER_TUNNELS = _gauge("hbone_listener_tunnels_open", "Tunnels of the HBONE port, open or opening.")
LISTENER_TUNNELS_LIMIT = _gauge("hbone_listener_tunnels_limit", "Tunnels that the HBONE port may have.")
REVERSE_CONNECTIONS = _gauge(
    "hbone_reverse_connections", "Connections of workloads that dial us, handshakes included."
)
REVERSE_CONNECTIONS_LIMIT = _gauge(
    "hbone_reverse_connections_limit", "Connections of workloads that there may be."
)
REVERSE_WORKLOADS = _gauge("hbone_reverse_workloads", "Connections of workloads that are registered.")
REVERSE_REGISTRATIONS = _counter(
    "hbone_reverse_registrations", "Times that a workload has registered a name."
)
REVERSE_NAMES = _gauge("hbone_reverse_names", "Names that are registered.")
REVERSE_NAMES_LIMIT = _gauge("hbone_reverse_names_limit", "Names that may be registered.")
REVERSE_LARGEST_NAME = _gauge("hbone_reverse_largest_name", "Connections of the name that has most.")
REVERSE_LARGEST_NAME_LIMIT = _gauge("hbone_reverse_largest_name_limit", "Connections that a name may have.")

# Names.

DNS_LOOKUPS = _counter(
    "hbone_dns_lookups",
    "Look-ups of names, by result.",
    result=(
        "found",
        "abandoned",
        "no_name",
        "no_address",
        "failed",
        "refused",
        "malformed",
        "timeout",
        "unreachable",
    ),
)
DNS_LOOKUP_SECONDS = _counter("hbone_dns_lookup_seconds", "Seconds that all look-ups together have taken.")
DNS_LOOKUPS_REUSED = _counter(
    "hbone_dns_lookups_reused", "Questions answered by another one's look-up, or by an answer that was kept."
)
_PARTY = {"for": "`clients`: names that clients choose; `settings`: names in settings"}
DNS_RUNNING = _gauge("hbone_dns_lookups_running", "Look-ups under way.", **_PARTY)
DNS_RUNNING_LIMIT = _gauge("hbone_dns_lookups_limit", "Look-ups that may be under way.", **_PARTY)
DNS_WAITING = _gauge("hbone_dns_lookups_waiting", "Look-ups that wait for others to end.", **_PARTY)
DNS_WAITING_LIMIT = _gauge("hbone_dns_lookups_waiting_limit", "Look-ups that may wait.", **_PARTY)
DNS_ANSWERS = _gauge("hbone_dns_answers", "Answers that are kept.")
DNS_ANSWERS_LIMIT = _gauge("hbone_dns_answers_limit", "Answers that may be kept.")

# The process.

READY = _gauge(
    "hbone_ready", "hgate: 1 if it accepts new connections, as a readiness probe is told, or else 0."
)
LOOP_LAG = _family(
    "hbone_event_loop_lag_seconds",
    Kind.HISTOGRAM,
    "hgate: how late the event loop was for a timer that is due every 0.25 s. All that it serves is as late.",
    {},
)
CONFIG_RELOADS = _counter("hbone_config_reloads", "Times that the file was read again.", result=_RESULT)
CONFIG_SUCCESSFUL = _gauge(
    "hbone_config_last_reload_successful", "1 if the file as it was last read is in effect, or else 0."
)
CONFIG_SUCCESS_TIME = _gauge(
    "hbone_config_last_reload_success_timestamp_seconds",
    "When the file was last read and put into effect, in seconds since 1970.",
)
_OBJECTS = "plural name of a kind, such as services"
CLUSTER_OBJECTS = _gauge(
    "hbone_cluster_objects", "Objects of the cluster that are known; only in hgate cluster.", kind=_OBJECTS
)
CLUSTER_FOLLOWED = _gauge(
    "hbone_cluster_followed", "1 if what is known of a kind is current, or else 0.", kind=_OBJECTS
)
CLUSTER_EVENTS = _counter("hbone_cluster_events", "Changes that the API server told.", kind=_OBJECTS)
CLUSTER_LISTS = _counter("hbone_cluster_lists", "Whole lists that were read.", kind=_OBJECTS)
CLUSTER_FAILURES = _counter(
    "hbone_cluster_failures",
    "Lists and watches that failed.",
    kind=_OBJECTS,
    status="HTTP status, or connection; broken and left out: single objects",
)
CLUSTER_ROUTES = _gauge("hbone_cluster_routes", "Routes from objects that are handed to the gateway.")
CLUSTER_REFUSED = _gauge("hbone_cluster_refused", "Objects that ask for a route and do not get it.")
CLUSTER_SERVICES = _gauge("hbone_cluster_services", "Services whose endpoints are handed to the gateway.")
CLUSTER_HANDOVERS = _counter(
    "hbone_cluster_handovers",
    "Times that a list was written for the gateway, or could not be.",
    list=("routes", "endpoints", "addresses"),
    result=_RESULT,
)
CLUSTER_ADDRESSES = _gauge(
    "hbone_cluster_addresses",
    "Addresses of Services that are handed to the gateway, or have no room in its list.",
    result=("listed", "left_out"),
)
CLUSTER_LEADER = _gauge("hbone_cluster_leader", "1 if this replica writes to the cluster, or else 0.")
CLUSTER_WRITES = _counter(
    "hbone_cluster_writes",
    "Objects that were written, or could not be.",
    what=("status", "mesh-env", "registration"),
    result=_RESULT,
)
WORKERS = _gauge("hbone_workers", "Worker processes; only with --workers.")
WORKER_RESTARTS = _counter(
    "hbone_worker_restarts", "Workers that were started in a dead one's place; only with --workers."
)
ACCESS_LOG_DROPPED = _counter("hbone_access_log_dropped", "Lines of the access log that nobody read in time.")
TRACE_SPANS = _counter(
    "hbone_trace_spans",
    "Spans of tunnels that were sent to the collector, or could not be; only with traces.",
    result=_RESULT,
)
TRACE_SPANS_DROPPED = _counter(
    "hbone_trace_spans_dropped",
    "Spans of tunnels that were given up because the collector is slow or away; only with traces.",
)
OPS_CONNECTIONS = _gauge("hbone_ops_connections_open", "Connections to the port.", port=_PORT)
OPS_CONNECTIONS_LIMIT = _gauge(
    "hbone_ops_connections_limit", "Connections that the port may have.", port=_PORT
)
OPS_EVICTED = _counter(
    "hbone_ops_connections_evicted",
    "Connections to the port that had to make room for others: slow ones, then idle ones.",
    port=_PORT,
)
OPS_REFUSALS = _counter(
    "hbone_ops_refusals",
    "Connections and requests turned away at the port. `full`: requests that are being answered have all "
    "places; `host`: the Host header names another machine; `site`: the request comes from another site's "
    "web page.",
    port=_PORT,
    reason=("full", *local_requests.FAULTS),
)

# krun.

APP_REQUESTS_OPEN = _gauge("hbone_app_requests_open", "krun: requests to the app that have not ended.")
APP_REQUESTS_LIMIT = _gauge("hbone_app_requests_limit", "krun: requests to the app that there may be.")
APP_REQUESTS_FAILED = _counter(
    "hbone_app_requests_failed",
    "krun: requests answered in the app's place, or cut off.",
    status="the HTTP status",
)
MTLS_END_CONNECTIONS = _gauge(
    "hbone_mtls_end_connections_open",
    "krun: connections of its own mTLS end; Envoy's are in Envoy's metrics.",
)
INNER_CONNECTIONS = _gauge(
    "hbone_inner_connections_open",
    "krun: connections of inner HBONE, of which a client has one for each of its own; handshakes included.",
)
INNER_CONNECTIONS_LIMIT = _gauge(
    "hbone_inner_connections_limit", "krun: connections, and tunnels, of inner HBONE that there may be."
)
MTLS_END_RESTARTS = _counter(
    "hbone_mtls_end_restarts", "krun: times that Envoy or pilot-agent has ended by itself."
)
POLICIES_UNENFORCED = _gauge(
    "hbone_policies_unenforced",
    "krun: policies of the mesh that apply to the workload, and that its mTLS end does not enforce.",
)
EGRESS_CONNECTIONS = _gauge(
    "hbone_egress_connections_open",
    "krun: connections of the app to its way into the mesh, local ports and the proxy.",
)
EGRESS_CONNECTIONS_LIMIT = _gauge(
    "hbone_egress_connections_limit", "krun: such connections that there may be."
)
START_SECONDS = _gauge(
    "hbone_start_seconds",
    "krun: what each step of the start took, in seconds.",
    step=("mounts", "identity", "mTLS end", "app"),
)
SCRAPE_FAILURES = _counter(
    "hbone_scrape_failures", "krun: scrapes that lack the metrics of somebody else.", of=("envoy", "app")
)
MOUNT_REFRESHES = _counter(
    "hbone_mount_refreshes",
    "krun: times that the files of a Secret or ConfigMap have been compared with it.",
    mount="secret/NAME or configmap/NAME",
    result=_RESULT,
)
_SSH = "krun's sshd: "
_SSH_KIND = ("shell", "exec", "sftp", "scp", "forward", "listen")

SSH_CONNECTIONS = _gauge("hbone_ssh_connections", _SSH + "connections to it.")
SSH_CONNECTIONS_LIMIT = _gauge("hbone_ssh_connections_limit", _SSH + "connections that it may have.")
SSH_LOGGING_IN = _gauge("hbone_ssh_logging_in", _SSH + "connections that nobody has logged in on yet.")
SSH_LOGINS = _counter(
    "hbone_ssh_logins", _SSH + "connections by whether anybody logged in.", result=("accepted", "refused")
)
SSH_ACTIVE = _gauge("hbone_ssh_active", _SSH + "open sessions and forwards; listen: ports.", kind=_SSH_KIND)
SSH_OPENED = _counter("hbone_ssh_opened", _SSH + "sessions and forwards that have begun.", kind=_SSH_KIND)
SSH_CHANNELS = _gauge("hbone_ssh_channels_max", _SSH + "channels of the connection that has most.")
SSH_CHANNELS_LIMIT = _gauge("hbone_ssh_channels_limit", _SSH + "channels that a connection may have.")
SSH_REFUSED = _counter(
    "hbone_ssh_refused",
    _SSH + "what was refused because a limit was reached.",
    limit=("connections", "attempts", "channels", "sessions", "listeners"),
)
# Istio's names, so that its dashboards work.

ISTIO_OPENED = _counter(
    "istio_tcp_connections_opened",
    "Tunnels opened, as Istio counts connections.",
    reporter=_REPORTER,
    response_flags=_FLAGS,
)
ISTIO_CLOSED = _counter(
    "istio_tcp_connections_closed",
    "Tunnels ended, as Istio counts connections.",
    reporter=_REPORTER,
    response_flags=_FLAGS,
)
ISTIO_SENT_BYTES = _counter(
    "istio_tcp_sent_bytes",
    "Bytes of responses: carried towards the client.",
    reporter=_REPORTER,
    response_flags=_FLAGS,
)
ISTIO_RECEIVED_BYTES = _counter(
    "istio_tcp_received_bytes",
    "Bytes of requests: carried from the client.",
    reporter=_REPORTER,
    response_flags=_FLAGS,
)
ISTIO_BUILD = _gauge(
    "istio_build", "Component and version; always 1.", component=("gateway",), tag="the version"
)
