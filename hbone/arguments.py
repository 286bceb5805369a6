"""The command line of `hbone`: each command's arguments and flags, with their help.

It imports nothing that only a command needs, because ssh users wait for `hbone URL`, and because the manual
pages are made from it where nothing is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from shared.command_line import Parser

T = TypeVar("T", int, float)

MAX_SECONDS = 86_400
"""Longest wait that can be set: a day."""

KEEPALIVE_S = 15.0
"""Silence after which the far side is asked for a sign of life; as much again without one ends the tunnel."""

MAX_TIMEOUT_S = 3600.0
"""Cloud Run's longest request timeout."""

MAX_COUNT = 1 << 20
"""No limit of Cloud Run comes near it; bytes of headers, streams, requests."""


def parser() -> Parser:
    """The whole command line."""
    from shared.config.fields import table_of
    from shared.credentials.token_sources.token_settings import TokenSettings

    top = Parser(
        "hbone",
        usage="hbone URL|HOST:PORT [flags]\n       hbone COMMAND [flags]",
        description="""\
Opens a tunnel to a port in a container that only HTTP/2 requests can reach, as on Cloud Run, and connects
it to standard input and output. The other end of the tunnel is krun, in the container. ssh can use hbone as
its ProxyCommand:

  ssh -o ProxyCommand='hbone https://SERVICE.a.run.app/_hbone/22' root@SERVICE

To see it work on your own machine, without Google Cloud:

  hbone demo""",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="hbone")
    for name, (help, description, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=help, description=description))
    variables = [setting for setting in table_of(TokenSettings).values() if setting.variable]
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
    add = parser.add_argument
    add("url", metavar="URL", help="https://HOST/_hbone/22; HOST:22 is short for the same")
    add("--token-file", type=Path, metavar="FILE", help="send the token in FILE")
    add(
        "--audience",
        metavar="AUDIENCE",
        help="audience of the token (default: https://HOST of the URL); with --token-file: the audience that "
        "the token in FILE must have",
    )
    add("--no-token", action="store_true", help="send no token")
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
    add("--metadata", default="127.0.0.1:8444", metavar="ADDRESS", help=f"the metadata server {shown}")
    add("--audience", default="https://hello.a.run.app", metavar="URL", help=f"the service's URL {shown}")
    add("--allow-unauthenticated", action="store_true", help="accept requests without a token")
    add(
        "--keys",
        metavar="URL|FILE",
        help="key set (JWKS) that signs the tokens (default: the metadata server's own key)",
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

Over https the request has an ID token for the URL's host. Environment variables say where it comes from
(hbone --help); hbone token shows it. On your own machine you can have one in a file:

  gcloud auth print-identity-token >token
  hbone --token-file token https://SERVICE.a.run.app/_hbone/22""",
        _connect,
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
    "version": ("print the version", "Prints the version.", lambda _: None),
}
"""Each command's line in `hbone --help`, its description, and what adds its arguments to a parser."""

EXIT_CODES: Mapping[str, str] = {
    "0": "success; connect: both ends have finished",
    "64": "a flag or an environment variable is wrong",
    "69": "the far side cannot be reached, broke off or no longer answers",
    "70": "demo: a request went wrong",
    "77": "the far side refused the request, or there is no token",
    "78": "certs: something is wrong with the certificates",
    "128+N": "ended by signal N (130: interrupted)",
}
