"""The command line of `hbone`: each command's arguments and flags, with their help.

It imports nothing that only a command needs, because ssh users wait for `hbone URL`, and because the manual
pages are made from it where nothing is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from shared.command_line import Parser, add_version_flags

T = TypeVar("T", int, float)

MAX_SECONDS = 86_400
"""Longest wait that can be set: a day."""

KEEPALIVE_S = 15.0
"""Silence after which the far side is asked for a sign of life; as much again without one ends the tunnel."""

STATUS_S = 30.0
"""For hgate to say what it has made of a Service: it takes two seconds, or as long as its start."""

MAX_TIMEOUT_S = 3600.0
"""Cloud Run's longest request timeout."""

PROBE_S = 30.0
"""For a first look; Cloud Run's default request timeout is five minutes."""

MAX_PROBE_S = 3660.0
"""A little more than the longest request timeout."""

MAX_COUNT = 1 << 20
"""No limit of Cloud Run comes near it; bytes of headers, streams, requests."""


def parser() -> Parser:
    """The whole command line."""
    from hbone.lookup_settings import LookupSettings
    from shared.config.fields import table_of
    from shared.credentials.token_sources.token_settings import TokenSettings

    top = Parser(
        "hbone",
        usage="hbone URL|HOST:PORT|SERVICE[.NAMESPACE]:PORT [flags]\n       hbone COMMAND [flags]",
        description="""\
Opens a tunnel to a port in a container that only HTTP/2 requests can reach, as on Cloud Run, and connects
it to standard input and output. The other end of the tunnel is krun, in the container. For example:

  hbone ssh hello.demo                                  # a shell: service hello of namespace demo
  hbone ssh hello.demo -- ls -l /tmp                    # one command
  hbone ssh-config hello.demo >>~/.ssh/config           # then scp, sftp and rsync find it, too:
  scp hello.demo:/tmp/heap.txt .                        #   copies a file
  hbone forward hello.demo -L 5432:DB                   # a database's port, on this machine
  hbone -v hello.demo:22                                # the bare tunnel, with each hop and its time
  hbone doctor hello.demo                               # what is wrong on the way
  ssh -o ProxyCommand='hbone https://HOST/_hbone/22' root@hello
  hbone demo                                            # all of it on this machine, without Google Cloud""",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="hbone")
    for name, (help, description, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=help, description=description))
    tables = table_of(TokenSettings), table_of(LookupSettings)
    variables = [setting for one in tables for setting in one.values() if setting.variable]
    top.add_table("environment variables", {setting.variable: setting.line for setting in variables})
    top.add_table("exit codes", EXIT_CODES)
    return top


def command_parser(name: str) -> Parser:
    """The command line of one command, from behind its name on: the others cost 0.7 ms."""
    _, description, add_arguments = COMMANDS[name]
    one = Parser(f"hbone {name}", description=description)
    add_arguments(one)
    return one


def _connect(parser: Parser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        help="https://HOST/_hbone/22; HOST:22 is short for the same; SERVICE.NAMESPACE:22 is looked up; "
        "behind the command's name :22 may be left out",
    )
    parser.add_argument(
        "-v",
        dest="verbose",
        action="count",
        default=0,
        help="print each hop and its time to standard error; -vv: more about each",
    )
    add_destination(parser)


def add_destination(parser: Parser) -> None:
    """The flags of a command that opens tunnels (`hbone.destination`)."""
    add = parser.add_argument
    add("--token-file", type=Path, metavar="FILE", help="send the token in FILE")
    add(
        "--audience",
        metavar="AUDIENCE",
        help="audience of the token (default: https://HOST of the URL); with --token-file: the audience that "
        "the token in FILE must have",
    )
    add("--no-token", action="store_true", help="send no token")
    add("--project", metavar="PROJECT", help="look for SERVICE at Cloud Run in this Google project")
    add("--region", metavar="REGION", help="look for SERVICE at Cloud Run in this region")
    add("--ca", type=Path, metavar="FILE", help="trust only the CA certificates in FILE (PEM)")
    add("--connect", metavar="HOST:PORT", help="connect to this address instead of the URL's host")
    add(
        "--keepalive",
        type=seconds,
        default=KEEPALIVE_S,
        metavar="SECONDS",
        help="send a PING after so many seconds of silence, and end the tunnel if it is not answered within "
        f"as many more; 0: never (default: {KEEPALIVE_S:g})",
    )


def destination_flags(options: argparse.Namespace) -> list[str]:
    """The flags of `add_destination` that `options` were made of, for another command line of ours that may
    be run elsewhere: files by their whole path."""
    parser = Parser("")
    add_destination(parser)
    words: list[str] = []
    for action in parser._get_optional_actions():
        value = getattr(options, action.dest, action.default)
        if action.dest == "help" or value == action.default:
            continue
        flag = action.option_strings[-1]
        if action.nargs == 0:
            words += [flag] * int(value)
            continue
        for one in value if isinstance(value, list) else [value]:
            text = f"{one:g}" if isinstance(one, float) else str(one)
            if isinstance(one, Path):
                text = str(one.absolute())
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def _ssh(parser: Parser) -> None:
    parser.usage = "hbone ssh [flags] [ssh's flags] [USER@]SERVICE [COMMAND...]"
    add = parser.add_argument
    add("service", metavar="SERVICE", help="where to: as for hbone connect, with USER@ before it if need be")
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="what is run in the container, instead of a shell; -t gives it a terminal",
    )
    _add_ssh(parser)
    add("--print", action="store_true", help="print ssh's command line, and do not run it")


def _ssh_config(parser: Parser) -> None:
    parser.add_argument(
        "services",
        nargs="*",
        metavar="SERVICE",
        help="as for hbone ssh; none: one stanza for all services",
    )
    _add_ssh(parser)


def _add_ssh(parser: Parser) -> None:
    parser.add_argument(
        "--any-host-key",
        action="store_true",
        help="accept any host key, for an sshd that makes one at each start; TLS still proves the service",
    )
    add_destination(parser)


def _forward(parser: Parser) -> None:
    ways = "-L [ADDR:]PORT:TARGET ... -R PORT:TARGET ... -D [ADDR:]PORT ..."
    parser.usage = f"hbone forward [flags] SERVICE {ways}"
    add = parser.add_argument
    add(
        "url",
        metavar="SERVICE",
        help="as for hbone connect; a port, or a path such as /_hbone/DB, is the default target of -L; with "
        "--sni: HOST:PORT of the gateway",
    )
    add(
        "-L",
        dest="local",
        action="append",
        metavar="[ADDR:]PORT:TARGET",
        help="listen here, and lead to TARGET in the container: a port that krun serves, such as 22, or NAME "
        "of its PORT_NAME; several are allowed",
    )
    add(
        "-R",
        dest="remote",
        action="append",
        metavar="PORT:TARGET",
        help="listen in the container, and lead to TARGET here: HOST:PORT, PORT or a unix socket's path; "
        "HBONE_REMOTE_PORTS of krun has to allow PORT",
    )
    add(
        "-D",
        dest="socks",
        action="append",
        metavar="[ADDR:]PORT",
        help="listen here for SOCKS; localhost:PORT is a target of SERVICE, SERVICE.NAMESPACE:PORT one of "
        "another service",
    )
    add(
        "--keep-trying",
        action="store_true",
        help="do not end if the service, or a target, cannot be had at the start",
    )
    add("--sni", metavar="NAME", help="speak the mesh's mTLS through a gateway, to the service NAME")
    add("--cert", type=Path, metavar="FILE", help="with --sni: certificate chain (PEM)")
    add("--key", type=Path, metavar="FILE", help="with --sni: its key (PEM)")
    add(
        "--peer",
        action="append",
        metavar="PATTERN",
        help="with --sni: SPIFFE ID that the service may have, such as spiffe://DOMAIN/ns/demo/sa/*; several "
        "are allowed (default: any of our own trust domain)",
    )
    said = parser.add_mutually_exclusive_group()
    said.add_argument(
        "-q", dest="quiet", action="store_true", help="print errors that end it, and nothing else"
    )
    said.add_argument("-v", dest="verbose", action="store_true", help="print each connection's begin and end")
    add_destination(parser)


def _token(parser: Parser) -> None:
    from shared.credentials.token_sources.token_settings import SOURCES

    add = parser.add_argument
    add("--audience", metavar="AUDIENCE", help="audience of the token, such as https://HOST")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="show the token in FILE; with --audience: the audience that it must have",
    )
    add("--source", choices=SOURCES, help="where the token comes from, instead of HBONE_TOKENS")
    add("--show", action="store_true", help="print the token itself, which is a secret, to standard output")


def _certs(parser: Parser) -> None:
    from shared.net.tls.certificate_folder import FOLDERS

    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        help="folder with a certificate, a key and CA certificates, under any customary file names (default: "
        f"the first of these that has one: {', '.join(map(str, FOLDERS))})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _demo(parser: Parser) -> None:
    parser.add_argument(
        "--keep", action="store_true", help="leave everything running, and print a curl command to try"
    )
    parser.add_argument(
        "--inbound",
        choices=("auto", "envoy", "builtin", "pilot-agent"),
        default="auto",
        help="what ends the mTLS in the container (default: auto, which is Envoy if it is installed, and "
        "pilot-agent with --mesh)",
    )
    parser.add_argument(
        "--mesh",
        action="store_true",
        help="the same in a real Istio mesh; as root, in a checkout, with Go 1.26 and etcd; building Istio "
        "takes twenty minutes the first time",
    )


def _cloudrun(parser: Parser) -> None:
    from hbone.cloudrun.limits import FrontEndLimits

    add, limits = parser.add_argument, FrontEndLimits()
    shown = "(default: %(default)s)"
    add(
        "--listen",
        default="127.0.0.1:8443",
        metavar="ADDRESS",
        help=f"where TLS with HTTP/2 is served {shown}",
    )
    add("--container", default="127.0.0.1:15009", metavar="ADDRESS", help=f"the container's h2c port {shown}")
    add(
        "--start",
        metavar="COMMAND",
        help="scale to zero: the first request starts the container with this command "
        "(default: the container is there)",
    )
    add(
        "--start-wait",
        type=_up_to(MAX_TIMEOUT_S),
        default=limits.start_wait_s,
        metavar="SECONDS",
        help=f"how long a request is held for a container that starts; 429 then {shown}",
    )
    add("--metadata", default="127.0.0.1:8444", metavar="ADDRESS", help=f"the metadata server {shown}")
    add("--audience", default="https://hello.a.run.app", metavar="URL", help=f"the service's URL {shown}")
    add("--allow-unauthenticated", action="store_true", help="accept requests without a token")
    add(
        "--keys",
        metavar="URL|FILE",
        help="key set (JWKS) that signs the tokens (default: the metadata server's own key)",
    )
    add(
        "--invoker",
        action="append",
        default=[],
        metavar="EMAIL",
        help="an account that may call the service; several are allowed (default: whoever has a token)",
    )
    add(
        "--ingress",
        choices=("all", "internal"),
        default="all",
        help=f"whom the service's ingress setting lets in; internal: nobody from here {shown}",
    )
    add("--issuer", metavar="NAME", help="issuer that the tokens must name (default: Google)")
    add(
        "--timeout",
        type=_up_to(MAX_TIMEOUT_S),
        default=limits.request_timeout_s,
        metavar="SECONDS",
        help=f"request timeout {shown}",
    )
    for flag, default, help in (
        ("--max-streams", limits.streams_per_connection, "streams on one connection"),
        ("--max-header-bytes", limits.header_bytes, "bytes of a request's URL and headers"),
        ("--concurrency", limits.concurrency, "requests that the container gets at once"),
    ):
        add(flag, type=_up_to(MAX_COUNT), default=default, metavar="N", help=f"{help} {shown}")
    add(
        "--dir",
        type=Path,
        metavar="FOLDER",
        help="where its certificates are written (default: a temporary folder)",
    )
    add(
        "--log-format",
        choices=("json", "text"),
        help="form of the log lines (default: text on a terminal, else json)",
    )


def _register(parser: Parser) -> None:
    from hbone.registered_service import CHOICES

    add = parser.add_argument
    add("url", metavar="URL", nargs="?", help="https://HOST of the service outside of the cluster")
    add(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="namespace of the Service (default: the kubeconfig context's)",
    )
    add("--name", metavar="NAME", help="name of the Service (default: the service's name in URL)")
    add(
        "--port",
        action="append",
        metavar="[NAME:]PORT",
        help="port of the Service; the name says what is spoken there: http, http2, grpc, tcp, or one of "
        "them with -WORD behind it; several are allowed (default: http:80)",
    )
    for flag, (_, metavar, help) in CHOICES.items():
        add(flag, metavar=metavar, help=help)
    does = parser.add_mutually_exclusive_group()
    does.add_argument(
        "--print",
        action="store_true",
        help="ask no cluster: print the Service and all that hgate would register for it, as YAML",
    )
    does.add_argument(
        "--remove",
        action="store_true",
        help="remove the Service, and with it what hgate has registered for it",
    )
    add(
        "--gateway",
        action="append",
        metavar="ADDRESS[:PORT]",
        help="with --print: IP address of hgate's Service, and its port (default: 15442); several are "
        "allowed",
    )
    add(
        "--domain",
        metavar="DOMAIN",
        help="with --print: the cluster's domain (default: cluster.local)",
    )
    add("--no-wait", action="store_true", help="do not wait for what hgate says about the Service")
    add(
        "--timeout",
        type=seconds,
        default=STATUS_S,
        metavar="SECONDS",
        help=f"wait so long for it (default: {STATUS_S:g})",
    )


def _doctor(parser: Parser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="as for connect; https://HOST without a path looks no further than krun (default: look at this "
        "machine only)",
    )
    add_destination(parser)
    add = parser.add_argument
    add(
        "--gateway",
        metavar="HOST:PORT",
        help="look at the way through this gateway instead, as a member of the mesh",
    )
    add("--sni", metavar="NAME", help="with --gateway: the server name that it routes by")
    add("--cert", type=Path, metavar="FILE", help="with --gateway: the client's certificate (PEM)")
    add("--key", type=Path, metavar="FILE", help="with --gateway: its key (default: in the same file)")
    add(
        "--peer",
        metavar="PATTERN",
        help="with --gateway: who the mTLS peer has to be, such as spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT",
    )
    add(
        "--timeout",
        type=_up_to(MAX_TIMEOUT_S),
        metavar="SECONDS",
        help="time for each hop (default: 10, and 60 for the service's first answer)",
    )
    add(
        "--probe",
        action="store_true",
        help="measure what lies between, against a krun with HBONE_PROBES=1, and print it as hgate's file",
    )
    add(
        "--probe-for",
        type=_up_to(MAX_PROBE_S),
        default=PROBE_S,
        metavar="SECONDS",
        help="how long to watch what happens to requests and connections with time, request timeouts for "
        f"example (default: {PROBE_S:g})",
    )
    add("--json", action="store_true", help="print JSON")


def seconds(text: str) -> float:
    """Raises ArgumentTypeError if `text` is no number of seconds from 0 to MAX_SECONDS."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number in 0..{MAX_SECONDS}")
    return number


def _up_to(most: T) -> Callable[[str], T]:
    """A reader of numbers of `most`'s type above 0 and up to `most`."""

    def read(text: str) -> T:
        try:
            number = type(most)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} is no number") from error
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to {most}")
        return number

    return read


COMMANDS: Mapping[str, tuple[str, str, Callable[[Parser], None]]] = {
    "connect": (
        "open a tunnel; the command may be left out",
        """\
Opens a tunnel to a port in a container, and connects it to standard input and output. The command may
be left out: hbone URL.

In place of a URL there can be HOST:PORT or the name of a service, SERVICE[.NAMESPACE]:PORT. A name of one
label or two is a service: the cluster of the current kubeconfig context is asked for its URL, then Cloud Run
in gcloud's project. A name of more labels is a host.

Over https the request has an ID token for the URL's host. On your own machine gcloud's login is enough:
gcloud auth login. Environment variables name other sources (hbone --help); hbone token shows the token.""",
        _connect,
    ),
    "ssh": (
        "get a shell in a container, or run a command there, by the system's ssh",
        """\
Runs ssh with hbone as its ProxyCommand, and with the settings that a tunnel asks for. Flags of one letter are
ssh's own, and what follows SERVICE is the command:

  hbone ssh hello.demo
  hbone ssh app@hello.demo tail -f /tmp/log
  hbone ssh -t hello.demo top
  hbone ssh -N -L 5432:127.0.0.1:5432 https://HOST
  hbone ssh --token-file token.jwt -i key -o ServerAliveInterval=5 HOST:22 -- ls -l

A connection reaches any instance of the service, and lasts as long as the service's request timeout. The
exit code is ssh's: 255 if the connection failed, else the command's.""",
        _ssh,
    ),
    "ssh-config": (
        "print what ~/.ssh/config needs, so that ssh, scp, sftp and rsync find a container",
        """\
Prints a stanza of ~/.ssh/config for each SERVICE, with the path of this hbone and all flags:

  hbone ssh-config hello.demo >>~/.ssh/config
  scp file hello:
  rsync -a folder hello:/tmp

and without SERVICE one for all: ssh HOST, where HOST is that of a Cloud Run URL, and ssh hello.demo.svc.""",
        _ssh_config,
    ),
    "forward": (
        "lead ports of this machine into a container, and back",
        """\
Listens on ports and unix sockets of this machine, and carries each connection to a target in a container:

  hbone forward hello.demo -L 5432:DB -L /tmp/app.sock:22
  hbone forward hello.demo -R 9229:localhost:9229
  hbone forward https://SERVICE.a.run.app -D 1080
  hbone forward GATEWAY:15442 --sni NAME --cert cert.pem --key key.pem --ca ca.pem -L 8080

A place is a port of 127.0.0.1, ADDR:PORT, or what has a slash: a unix socket, which only its owner may open.
All connections share one HTTP/2 connection. Once all are listened on, it says "ready" on standard error.""",
        _forward,
    ),
    "token": (
        "show the token that a tunnel would send",
        """\
Gets the token that a tunnel would send, and prints whose it is, its audience and when it expires:

  hbone token --audience https://SERVICE.a.run.app""",
        _token,
    ),
    "certs": (
        "show the certificates in a folder, and what is wrong with them",
        """\
Prints whose the certificates in FOLDER are, who issued them, when they expire, and what is wrong with
them. The exit code is 78 if something is.""",
        _certs,
    ),
    "register": (
        "make a service outside of the cluster a Service of the mesh",
        """\
Writes a Service without endpoints into the cluster of the current kubeconfig context, with annotations that
lead hgate to URL, and prints what hgate has made of it:

  hbone register https://hello-123456789012.us-central1.run.app -n demo

hgate in the cluster has to have cluster: in its file, and there an entry that allows the namespace to lead to
the URL's host. For manifests in a repository, and without any access to a cluster:

  hbone register --print URL -n demo --gateway 10.0.0.50 >hello.yaml

A Service that others have written is changed only where they have said nothing.""",
        _register,
    ),
    "doctor": (
        "look at each hop of a path, and say what is wrong with the first that fails",
        """\
Walks from here to a port in a container, hop by hop, and prints PASS, FAIL or SKIP for each; for the first
that fails also the cause and what to do. The exit code is that hop's (docs/reference/doctor.md):

  hbone doctor https://SERVICE.a.run.app/_hbone/22

Through a gateway of the mesh, to the mTLS end of a workload:

  hbone doctor --gateway 10.0.0.50:15443 --sni outbound_.8080_._.hello.demo.svc.cluster.local \\
    --cert cert-chain.pem --key key.pem --ca root-cert.pem

To measure a service's front end, as settings for hgate:

  hbone doctor --probe --probe-for 310 https://SERVICE.a.run.app >measured.yaml

Without an argument: what this machine has.""",
        _doctor,
    ),
    "demo": (
        "send requests through all programs on this machine, and print each hop",
        """\
Starts hgate, a stand-in for Cloud Run, krun and an app on this machine, sends requests through all of
them, and prints what each of them logged. The exit code is 70 if a request went wrong.""",
        _demo,
    ),
    "cloudrun": (
        "serve as a stand-in for Cloud Run's front end",
        """\
A stand-in for Cloud Run's front end on your own machine, with its limits, and a metadata server that
issues the tokens which it accepts. Prints the addresses and files that hgate or hbone need for it.""",
        _cloudrun,
    ),
    "version": ("print the version", "Prints the version.", add_version_flags),
}
"""Each command's line in `hbone --help`, its description, and what adds its arguments to a parser."""

EXIT_CODES: Mapping[str, str] = {
    "0": "success; connect: both ends have finished",
    "64": "a flag or an environment variable is wrong",
    "69": "the far side cannot be reached, broke off or no longer answers; register: no hgate has said "
    "anything",
    "70": "demo: a request went wrong",
    "77": "the far side refused the request, or there is no token; register: others own the Service, or "
    "hgate refuses it",
    "78": "certs: something is wrong with the certificates",
    "80 to 98": "doctor: the hop that failed (docs/reference/doctor.md)",
    "128+N": "ended by signal N (130: interrupted)",
}
