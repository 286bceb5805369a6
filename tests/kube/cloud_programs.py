"""Stand-ins for the programs that need a Google Cloud project, a Docker daemon or machines: gcloud, docker,
istioctl. Each checks that its subcommand and flags are among those below (from the programs' references), and
records the call. Nothing is done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECORD = "TEST_CLOUD_PROGRAMS"
"""The variable with the file for the calls."""

NUMBER = "123456789012"
"""Of the project."""

_BINDING = {"--member", "--role", "--condition"}
KNOWN: Mapping[str, Mapping[str, set[str]]] = {
    "gcloud": {
        "artifacts repositories create": {"--repository-format", "--location"},
        "artifacts repositories delete": {"--location", "--quiet"},
        "auth configure-docker": {"--quiet"},
        "auth login": set(),
        "container clusters create": {
            *("--region", "--num-nodes", "--machine-type", "--enable-dataplane-v2", "--workload-pool"),
        },
        "container clusters delete": {"--region", "--quiet"},
        "iam service-accounts add-iam-policy-binding": _BINDING,
        "iam service-accounts create": set(),
        "iam service-accounts delete": {"--quiet"},
        "projects add-iam-policy-binding": _BINDING,
        "projects describe": {"--format"},
        "run services delete": {"--region", "--quiet"},
        "run services logs read": {"--region", "--limit"},
        "run services replace": {"--region"},
        "services enable": set(),
    },
    "docker": {"build": {"--push", "--platform", "-f", "-t"}},
    "istioctl": {"install": {"--skip-confirmation", "--set"}},
}
"""The flags of the subcommands that there are, by program."""


@dataclass(frozen=True, slots=True)
class Call:
    """One that was made."""

    program: str
    command: str
    arguments: list[str]
    """Behind the subcommand."""
    project: str
    """What gcloud takes for its project."""
    read: str
    """What stood in the file /dev/stdin, if that was an argument."""


def calls(record: Path) -> list[Call]:
    return [Call(**json.loads(line)) for line in record.read_text().splitlines()]


def put_on_path(folder: Path) -> None:
    """Makes the programs in `folder`."""
    for name in KNOWN:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__)}" {name} "$@"\n')
        program.chmod(0o755)


def main(program: str, *words: str) -> int:
    """The exit code: 2, as of the programs, for a command line that is wrong."""
    line = " ".join(words)
    found = [command for command in KNOWN[program] if f"{line} ".startswith(f"{command} ")]
    if not found:
        print(f"{program}: no such command: {line}", file=sys.stderr)
        return 2
    command = max(found, key=len)
    arguments = list(words[len(command.split()) :])
    flags = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    if unknown := flags - KNOWN[program][command]:
        print(f"{program} {command}: unrecognized arguments: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    read = sys.stdin.read() if "/dev/stdin" in arguments else ""
    call = Call(program, command, arguments, os.environ.get("CLOUDSDK_CORE_PROJECT", ""), read)
    with Path(os.environ[RECORD]).open("a") as record:
        record.write(json.dumps({name: getattr(call, name) for name in Call.__slots__}) + "\n")
    if command == "projects describe":
        print(NUMBER)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
