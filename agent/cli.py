"""krun's command line: its own flags, then the app's command; settings are environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shared.command_errors import exit_code
from shared.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from agent.config.layers import Layers
    from agent.config.mesh_name import MeshName
    from agent.config.settings import Settings
    from agent.mesh.finding import Found
    from shared.command_line import Parser
    from shared.credentials.kubernetes.kubernetes_access import Access

EXPLAIN = "explain"
CAPTURE = "capture"
CAPTURE_ACTS = ("print", "apply", "remove")


def parser() -> Parser:
    """krun's command line. All of it behind the first word that is no flag is COMMAND's, `--` included."""
    import argparse  # which takes a cold start 1.3 ms, and most have no flags

    from agent.config.settings import ENVIRONMENT
    from shared.command_line import Parser

    own = Parser(
        "krun",
        usage="krun [flags] [--] [COMMAND [ARG ...]]",
        description="""\
Ends a service mesh's tunnels in the container of an app. Starts COMMAND, the app, with PORT set, waits
until it listens on that port, then accepts tunnels. Without COMMAND it serves as a sidecar. A COMMAND that
begins with - needs -- in front of it. Flags take precedence over environment variables.

`krun explain` starts nothing, and prints each setting with its value and where that comes from.
`krun capture print|apply|remove` prints, applies or removes the rules that capture outbound traffic. An app
of such a name needs -- in front of it, too.""",
    )
    own.add_log_flags()
    own.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the app, with its arguments"
    )
    own.add_table("environment variables", ENVIRONMENT)
    own.add_table(
        "exit codes",
        {
            "COMMAND's": "COMMAND has ended; 128+N: by signal N, 126, 127: it cannot be started",
            "0": "without COMMAND: stopped by a signal, after the drain",
            "64": "a flag or an environment variable is wrong",
            "69": "a port is in use, or a program or a file cannot be had",
            "77": "there is no token, no certificate or no permission",
            "78": "a file has a mistake, or what a variable refers to",
            "130, 143": "SIGINT or SIGTERM before COMMAND was started",
        },
    )
    return own


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs krun with `arguments` and returns the exit code (`shared.errors`)."""
    return exit_code("krun", lambda: _run(arguments, environ))


def _run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    from agent.config.layers import Layers
    from agent.config.settings import from_env

    flags, command = _parsed(arguments)
    layers = Layers.of(environ, flags)
    if command == [EXPLAIN] and "--" not in arguments:
        return _explain(layers)
    if command[:1] == [CAPTURE] and "--" not in arguments:
        return _capture(layers, command[1:])
    mesh = _mesh(layers)
    own = None if mesh else from_env(layers.merged())  # a mistake costs no import
    from agent.app import Agent
    from agent.capture import leftovers
    from shared import loop
    from shared.ops.access_log import AccessLog

    if os.getpid() == 1:
        from agent.launch.launcher import become_init, reset_signals

        reset_signals(os.getpid())
        if command:
            become_init(os.getpid())
    _set_up_log(layers)

    async def serve() -> int:
        await leftovers.remove(layers.merged().get("PATH"))
        if own is not None:
            settings, known, access = own, layers, None
        else:
            settings, (known, access) = await _found(layers, mesh)
        # Standard output is the app's.
        access_log = AccessLog(sys.stderr, settings.log_format, "krun")
        return await Agent(settings, command, environ, access_log, known, access).run()

    return loop.run(serve())


def _explain(layers: Layers) -> int:
    from agent.config.explain import explained, table

    settings, layers, access = _settings(layers)
    print(table(explained(layers)))
    from agent.ssh.key_sources import told
    from shared import loop

    print(f"  sshd: {loop.run(told(settings.ssh, access))}")
    return EXIT_OK


def _capture(layers: Layers, words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in CAPTURE_ACTS:
        raise UsageError(f"krun capture {'|'.join(CAPTURE_ACTS)}; an app of that name: krun -- capture")
    from agent.capture.by_hand import act
    from shared import loop

    settings, layers, _ = _settings(layers)
    print(loop.run(act(words[0], settings, layers.merged().get("PATH"))), end="")
    return EXIT_OK


def _settings(layers: Layers) -> tuple[Settings, Layers, Access | None]:
    """The settings, those of the mesh included, where they are from, and the way to the cluster that MESH
    names."""
    from agent.config.settings import from_env

    mesh = _mesh(layers)
    if not mesh:
        return from_env(layers.merged()), layers, None
    from shared import loop

    _set_up_log(layers)
    settings, (found, access) = loop.run(_found(layers, mesh))
    return settings, found, access


def _mesh(layers: Layers) -> MeshName:
    """What MESH says; empty: nothing is to be found. Raises UsageError."""
    from agent.config.mesh_settings import MESH
    from shared.config.fields import Environment

    text = Environment(layers.merged())(MESH)
    if not text:
        return ""
    from agent.config.mesh_name import parse

    return parse(text)


async def _found(layers: Layers, mesh: MeshName) -> tuple[Settings, Found]:
    """The settings with those of the mesh, and what they are from."""
    from agent.config.settings import from_env
    from agent.mesh.finding import find
    from agent.mesh.mesh_env import blamed

    found = await find(layers, mesh)
    try:
        return from_env(found.layers.merged()), found
    except UsageError as error:
        raise blamed(error, found.layers) from error


def _set_up_log(layers: Layers) -> None:
    from agent.config.settings import Settings
    from shared.config.fields import Environment, table_of
    from shared.ops import log

    read, table = Environment(layers.merged()), table_of(Settings)
    log.setup(read(table["log_format"]), read(table["log_level"]), component="krun")


def _parsed(arguments: Sequence[str]) -> tuple[Mapping[str, str], Sequence[str]]:
    """krun's own flags, as the environment variables that they go over, and the app's command. Raises
    UsageError if a flag is wrong."""
    if not arguments or not arguments[0].startswith("-"):
        return {}, arguments
    try:
        options = vars(parser().parse_args(arguments))
    except UsageError as error:
        raise UsageError(f"{error}; settings are environment variables") from None
    command: list[str] = options.pop("command")
    flags = {f"HBONE_{name.upper()}": value for name, value in options.items()}
    return flags, command[1:] if command[:1] == ["--"] else command
