"""`hbone ssh-config`: stanzas for ~/.ssh/config, so that ssh, scp, sftp and rsync find a container."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping

from hbone import arguments, output, ssh_settings
from hbone.name_in_url import name_in
from shared.errors import EXIT_OK, UsageError

ALL_SERVICES = """*.run.app *.svc *.svc.cluster.local "!*'*\""""
"""The hosts of Cloud Run's URLs, and long forms of SERVICE.NAMESPACE: a pattern has to match something. No
host with a quote in it: the name, which may come from a link or a submodule's URL, is put into a shell's line
between two, and ssh before 9.6 does not look at it (CVE-2023-51385)."""

_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+-]*\$?")
"""A user's name that is the same word to ssh wherever it stands."""


def run(options: argparse.Namespace) -> int:
    """Prints a stanza for each service, or one for all.

    Raises:
        UsageError: a service, or a flag, is nothing that ssh can be told.
        UnavailableError: the stanzas cannot be written.
    """
    flags, any_key = arguments.destination_flags(options), options.any_host_key
    stanzas = []
    named: set[str] = set()
    for text in options.services:
        user, service = ssh_settings.split_user(text)
        told = ssh_settings.of_service(flags, service, any_key=any_key)
        if user:
            if not _USER.fullmatch(user):
                raise UsageError(f"{text!a}: {user!a} is no user's name that ssh's settings can have")
            told["User"] = user
        host = told["HostKeyAlias"]
        # ssh goes by the first stanza of a name, so a second service of one name has only its whole host.
        names = [name for name in dict.fromkeys((name_in(host), host)) if name not in named]
        named.update(names)
        stanzas.append(_stanza(" ".join(names or [host]), told))
    if not stanzas:
        stanzas.append(_stanza(ALL_SERVICES, ssh_settings.of_all(flags, any_key=any_key)))
    output.write(sys.stdout, "\n".join(stanzas))
    return EXIT_OK


def _stanza(hosts: str, settings: Mapping[str, str]) -> str:
    lines = [f"Host {hosts}", *(f"  {name} {value}" for name, value in settings.items())]
    return "".join(f"{line}\n" for line in lines)
