"""Writes docs/reference from the code: `python -m docs.write_reference`, or `make reference`.

A test compares the files with PAGES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from agent.config.settings import groups
from gateway.config.config import GatewayConfig
from gateway.config.sections import Section, Structure, Table, file_table
from shared import ports
from shared.command_line import Parser
from shared.command_pages import PROGRAMS, flags_of, subcommands
from shared.config.markdown import code, default, meaning, page, table
from shared.doctor.failures import Failure
from shared.doctor.hops import Hop
from shared.errors import EXIT_CODES, Flag
from shared.ops.families import FAMILIES, Family
from shared.ops.metrics import LAG_BUCKETS_S, MAX_LABELS, OTHER, SETUP_BUCKETS_S

UNITS = (
    "A duration is a number with `ms`, `s`, `m` or `h` behind it, or a plain number of seconds. A size is a "
    "number with `KiB`, `MiB` or `GiB` behind it, or a plain number of bytes."
)

FOLDER = Path(__file__).parent / "reference"


def krun() -> str:
    """krun's environment variables."""
    parts = [
        "krun is set by environment variables. A variable that is set but empty counts as not set. A wrong "
        "value ends krun with exit code 64, with the variable's name and the reason on standard error.",
        UNITS,
    ]
    for name, settings in groups().items():
        rows = [(code(one.variable), meaning(one), one.kind.form(), default(one)) for one in settings]
        parts += [f"## {name}", table(("variable", "meaning", "value", "default"), rows)]
    return page("Variables of krun", *parts)


def hgate() -> str:
    """The settings of hgate's file."""
    parts = [
        "The file is YAML, by default `/etc/hgate/hgate.yaml`. hgate reports all mistakes of a file at once, "
        "each as FILE:LINE: FIELD: REASON. An unknown field is a mistake.",
        "A change of the file is seen within seconds; SIGHUP has it read at once. Settings with `restart` in "
        "the last column take effect at the next start, those with `yes` at once, for new connections and "
        "tunnels. A file with a mistake changes nothing.",
        "Where a setting has an environment variable, the variable goes over the file. Where a limit has a "
        "flag, the access log has it for what the limit ended or refused.",
        UNITS,
    ]
    sections: list[tuple[str, Table, bool]] = [("", file_table(GatewayConfig), False)]
    for name, fields, restart in sections:  # to which each adds the sections in it
        rows = []
        for field, one in fields.items():
            kind, waits = one.kind, restart or one.restart
            form, usual = kind.form(), "has to be there" if one.needed is not None else default(one)
            if isinstance(kind, Structure) and kind.inner:
                place = f"{name}.{field}{'[]' if kind.each else ''}".removeprefix(".")
                sections.append((place, kind.inner, waits))
                form = f"[{form}](#{_anchor(place)})"
            variable = f" Variable: `{one.variable}`." if one.variable else ""
            reload = "restart" if waits else "" if isinstance(kind, Section) else "yes"
            rows.append((code(field), meaning(one) + variable, form, usual, reload))
        parts += [f"## {name or 'The file'}", table(("field", "meaning", "value", "default", "reload"), rows)]
    return page("Settings of hgate's file", *parts)


def _anchor(heading: str) -> str:
    """What GitHub makes of a heading for links to it."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def exit_codes() -> str:
    """What the commands end with."""
    rows = [(str(number), text) for number, text in EXIT_CODES.items()]
    return page(
        "Exit codes",
        "hgate, krun and hbone end with these codes:",
        table(("code", "meaning"), rows),
        "`krun COMMAND` ends with the command's own code, with 128+N if signal N ended the command, and with "
        "126 or 127 if it could not be started.",
        "`hbone URL` ends with 128+N when signal N ended it: 129 for SIGHUP, 141 if its reader has gone, 143 "
        "for SIGTERM.",
        "`hbone doctor` and `hgate doctor` end with 80 to 98: [the hop that failed](doctor.md).",
    )


def doctor() -> str:
    """The hops that `hbone doctor` and `hgate doctor` walk, and what they can find."""
    hops = ((str(hop.exit_code), hop.word, hop.section.value, hop.about) for hop in Hop)
    failures = ((code(one.name), one.hop.word, one.cause, one.action) for one in Failure)
    return page(
        "Hops and failures of the doctor",
        "`hbone doctor` and `hgate doctor` end with 0 if no hop has failed, else with the code of the hop "
        "that failed. `hgate doctor`, which walks many paths, ends with the lowest of their codes but 0: the "
        "hop nearest to the gateway.",
        table(("code", "hop", "section", "passes if"), hops),
        "## Failures",
        "The name is what `--json` has as `failure.name`.",
        table(("name", "hop", "cause", "what to do"), failures),
    )


def commands() -> str:
    """The command lines of all three commands."""
    parts = [
        "What `--help` says, and `man hgate`, `man krun` and `man hbone`. A flag goes over an environment "
        "variable, a variable over the file, and the file over the default. Every command has `--help` and "
        "`--version`."
    ]
    for module in PROGRAMS:
        parser = import_module(module).parser()
        parts += [f"## {parser.prog}", *_command_line(parser)]
        for name, _, command in subcommands(parser):
            parts += [f"### {parser.prog} {name}", *_command_line(command)]
    return page("Command lines", *parts)


def _command_line(parser: Parser) -> list[str]:
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    rows = [
        (", ".join(code(f"{word} {value}".strip()) for word in words), text)
        for words, value, text in flags_of(parser, of_all=False)
    ]
    lines = "\n".join(line.removeprefix("       ") for line in usage.splitlines())
    parts = [f"```text\n{lines}\n```"]
    return [*parts, table(("flag", "meaning"), rows)] if rows else parts


def metrics() -> str:
    """The metrics, from their declarations."""
    port = ports.METRICS
    setup, lag = (", ".join(f"{bound:g}" for bound in bounds) for bounds in (SETUP_BUCKETS_S, LAG_BUCKETS_S))
    return page(
        "Metrics",
        f"""\
hgate serves its metrics on the port `metrics` ({port}), at `/metrics` and `/stats/prometheus`, in Prometheus'
text format, or in OpenMetrics if the request asks for it. With `--workers` the numbers are the sums over all
workers, except where the table says otherwise.

krun serves its own on port {port} (HBONE_METRICS), with Envoy's and the app's, in Prometheus' text format. It
has the tunnels, without setup and retries, the connections, the bytes held, the ports for operators, the
access log, the certificates, and those that begin with "krun:".

- Routes come from hgate's file. The route of the HBONE port's tunnels is `hbone`.
- Origins and audiences may contain what a client has chosen, where a template fills it in.
- {MAX_LABELS:,} routes, origins and audiences each are counted apart, all others as `{OTHER}`.
- `flags` and `response_flags` are [response flags](flags.md).
- Bytes sent are bytes towards the service. Istio's names mean the opposite: there sent bytes are those of the
  response.
- `hbone_tunnel_setup_seconds` has the buckets {setup} (seconds), `hbone_event_loop_lag_seconds` {lag}.
- The process has the usual metrics of Prometheus' clients, too: `process_resident_memory_bytes`,
  `process_open_fds`, `process_cpu_seconds_total` and so on; of krun with `krun_` before them, for the plain
  names are the app's.""",
        table(("metric", "type", "labels", "meaning"), map(_metric_row, FAMILIES)),
    )


def flags() -> str:
    """The response flags."""
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


PAGES: Mapping[str, Callable[[], str]] = {
    "hgate.md": hgate,
    "krun.md": krun,
    "commands.md": commands,
    "exit-codes.md": exit_codes,
    "doctor.md": doctor,
    "metrics.md": metrics,
    "flags.md": flags,
}
"""Each page by its file's name."""


def write() -> None:
    """Writes all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())


if __name__ == "__main__":
    write()
