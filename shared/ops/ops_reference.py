"""The reference pages about metrics and response flags, made from the code."""

from __future__ import annotations

from shared.config.markdown import code, page, table
from shared.errors import Flag
from shared.ops.families import FAMILIES, Family
from shared.ops.metrics import MAX_LABELS, OTHER, SETUP_BUCKETS_S


def metrics_reference() -> str:
    """docs/reference/metrics.md."""
    buckets = ", ".join(f"{bound:g}" for bound in SETUP_BUCKETS_S)
    return page(
        "Metrics",
        f"""\
hgate serves its metrics on the port `metrics` (15020), at `/metrics` and `/stats/prometheus`, in Prometheus'
text format, or in OpenMetrics if the request asks for it. With `--workers` the numbers are the sums over all
workers, except where the table says otherwise.

- Routes come from hgate's file. The route of the HBONE port's tunnels is `hbone`.
- Origins and audiences may contain what a client has chosen, where a template fills it in.
- {MAX_LABELS:,} routes, origins and audiences each are counted apart, all others as `{OTHER}`.
- `flags` and `response_flags` are [response flags](flags.md).
- Bytes sent are bytes towards the service. Istio's names mean the opposite: there sent bytes are those of the
  response.
- `hbone_tunnel_setup_seconds` has the buckets {buckets} (seconds).
- The process has the usual metrics of Prometheus' clients, too: `process_resident_memory_bytes`,
  `process_open_fds`, `process_cpu_seconds_total` and so on.""",
        table(("metric", "type", "labels", "meaning"), map(_metric_row, FAMILIES)),
    )


def flags_reference() -> str:
    """docs/reference/flags.md."""
    return page(
        "Response flags",
        """\
A response flag says in one word how a connection or a tunnel ended. It stands in the access log as `flags`
and in [metrics](metrics.md) as the label `flags` or `response_flags`. hgate and krun have the same flags.

The last column names the TLS alert (RFC 8446 section 6), the HTTP status or the way in which the connection
ends.""",
        table(
            ("flag", "meaning", "the client gets"),
            ((code(flag), flag.meaning, flag.client_sees) for flag in Flag),
        ),
    )


def _metric_row(family: Family) -> tuple[str, ...]:
    labels = (
        f"`{label}`: {values if isinstance(values, str) else ', '.join(f'`{value}`' for value in values)}"
        for label, values in family.labels.items()
    )
    return code(family.shown_name), family.kind, "; ".join(labels), family.help
