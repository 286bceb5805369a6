"""`hbone ssh`: the system's ssh, told all that a tunnel asks for. It takes the place of this process, so
terminal, signals and exit code are ssh's own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hbone import arguments, output, ssh_settings
from shared.command_line import Parser
from shared.errors import EXIT_OK, UnavailableError, UsageError

WITH_VALUE = frozenset("BbcDEeFIiJLlmOopPQRSWw")
"""Flags of ssh(1) that have a value, in the same word or the next one."""

_SEES_OTHER_KEY = (
    '[ "$1" = HOSTNAME ] || exit 0; host=$2 type=$3 key=$4 text=$5; shift 5; '
    'case $(ssh-keygen -F "$host" "$@" 2>/dev/null) in '
    '*"$key"*) ;; *" $type "*) echo "$text" >&2 ;; esac; exit 0'
)
"""A shell's, as KnownHostsCommand. It is given why ssh asks, the host's name, type and value of the key that
is shown, what to say if another key of the type is known, and where ssh-keygen is to look if not in its own
file. It has no braces, for ssh would look for variables in them."""

_OTHER_KEY = (
    "hbone: {host} has shown another host key before. A connection reaches any instance of a service, and "
    "each of them, or each start, may have made its own: give all of them one key, or use --any-host-key "
    "(TLS has proved the service)"
)

_KNOWN_HOSTS = re.compile(r'\s*UserKnownHostsFile[\s="]+([^\s"]+)', re.IGNORECASE)


class CommandLine(NamedTuple):
    """The words behind `hbone ssh`. No dataclass, whose module takes 5 ms to import."""

    ours: list[str]
    """Flags of hbone."""

    sshs: list[str]
    """Flags of ssh."""

    service: str
    """[USER@]SERVICE; empty if there is none."""

    command: list[str]
    """For the container; empty: a shell."""


def run(words: Sequence[str]) -> int:
    """Becomes ssh, or prints its command line (`--print`).

    Raises:
        UsageError: the command line is wrong.
        UnavailableError: there is no ssh.
    """
    parser = arguments.command_parser("ssh")
    line = split(words, parser)
    options = parser.parse_args([*line.ours, "-"])  # a SERVICE that is no flag, whatever ours is
    if not line.service:
        raise UsageError("no SERVICE; see hbone ssh --help")
    user, service = ssh_settings.split_user(line.service)
    flags = _verbose(line.sshs) + arguments.destination_flags(options)
    told = ssh_settings.of_service(flags, service, any_key=options.any_host_key)
    host = told["HostKeyAlias"]
    # What is printed is for people, and does the same.
    if not options.any_host_key and not options.print and _has_setting("KnownHostsCommand"):
        told |= _hint(host, line.sshs)
    command = [
        *("ssh", *line.sshs),  # first, for ssh goes by the first value of a setting
        *(word for name, value in told.items() for word in ("-o", f"{name}={value}")),
        *("--", f"{user}@{host}" if user else host, *line.command),
    ]
    if options.print:
        output.write(sys.stdout, f"{shlex.join(command)}\n")
        return EXIT_OK
    return _become(command)


def split(words: Sequence[str], parser: Parser) -> CommandLine:
    """Takes a command line apart, without a look at what its words mean. As with ssh, flags may be before and
    behind SERVICE, and the command begins with the next word that is none, or behind `--`. A flag that
    `parser` knows, or that is longer than a letter, is ours."""
    ours: list[str] = []
    sshs: list[str] = []
    service = ""
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--":
            del rest[0]
            if not service and rest:
                service = rest.pop(0)
            break
        if word == "-" or not word.startswith("-"):
            if service:
                break
            service = rest.pop(0)
            continue
        ours_wants_value = parser.wants_value(word)
        if ours_wants_value is not None or word.startswith("--"):
            flags, count = ours, 2 if ours_wants_value else 1
        else:
            flags, count = sshs, 2 if _wants_value(word) else 1
        flags += rest[:count]
        del rest[:count]
    return CommandLine(ours, sshs, service, rest)


def _wants_value(word: str) -> bool:
    """Whether the next word is the value of ssh's flag, or of the last of several flags in one word."""
    for number, letter in enumerate(word[1:], 2):
        if letter in WITH_VALUE:
            return number == len(word)
    return False


def _verbose(sshs: Sequence[str]) -> list[str]:
    """-v for the tunnel, as often as ssh has it: who looks for a fault wants to see each hop."""
    times = sum(len(word) - 1 for word in sshs if word.startswith("-v") and not word.strip("-v"))
    if times and arguments.command_parser("connect").wants_value("-v") is not None:
        return ["-v"] * min(times, 2)
    return []


def _hint(host: str, sshs: Sequence[str]) -> dict[str, str]:
    """Settings with which a person reads what a changed host key means here, before ssh's own warning."""
    known = [found[1] for word in sshs if (found := _KNOWN_HOSTS.match(word.removeprefix("-o")))]
    where = ["-f", os.path.expanduser(known[0])] if known else []
    script, *more = map(_in_quotes, (_SEES_OTHER_KEY, _OTHER_KEY.format(host=host), *where))
    command = f"/bin/sh -c {script} sh %I %H %t %K {' '.join(more)}"
    return {"KnownHostsCommand": command}


def _has_setting(name: str) -> bool:
    """Whether the system's ssh, asked in 3 ms, knows a setting: KnownHostsCommand came with OpenSSH 8.5. To
    have it ignored with IgnoreUnknown would undo that of the user's own file, which ssh would then refuse."""
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    words = ["ssh", "-F", "none", "-o", f"{name}=none", "-V"]
    try:
        asked = os.posix_spawnp("ssh", words, os.environ, file_actions=nowhere)
    except OSError:
        return False  # there is none, as will be said
    return os.waitpid(asked, 0)[1] == 0


def _in_quotes(word: str) -> str:
    """A word of a command that ssh splits itself, without a shell."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _become(command: list[str]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and so would whatever it turns into
    try:
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        how = "install OpenSSH's client (Debian: apt-get install openssh-client)"
        raise UnavailableError(f"no ssh on PATH: {how}") from error
    except OSError as error:
        raise UnavailableError(f"ssh cannot be run: {error.strerror}") from error
