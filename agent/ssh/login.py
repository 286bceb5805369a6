"""As whom sessions run, in which shell, and with which environment: the app's.

If krun is not root, sessions run as krun's own user, and nobody else can be asked for. If it is, the user has
to be said (HBONE_SSH_USER), root included.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import UnavailableError

SHELLS = ("/bin/bash", "/bin/sh", "/busybox/sh")
"""Looked for in this order where the user has none; the last is that of distroless debug images."""

_NO_SHELLS = ("nologin", "false")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the app has none."""

FROM_CLIENTS = ("LANG", "LC_", "COLORTERM", "TERM_PROGRAM")
"""What the names of variables begin with that a client may set."""


@dataclass(frozen=True, slots=True)
class Login:
    """The user of all sessions."""

    name: str
    """Its number where /etc/passwd does not know it."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    """Further ones, to be set where the user is not krun's own."""

    home: str
    shell: str
    """Empty: the image has none."""

    is_own: bool
    """It is krun's own user, so nothing has to be given up."""

    in_passwd: bool
    has_own_shell: bool
    """`shell` is that of /etc/passwd."""


def login(setting: str) -> Login:
    """The user that HBONE_SSH_USER says, empty for krun's own. Raises UnavailableError: there is no such
    user, or it cannot be that one."""
    own = os.geteuid()
    if not setting and own == 0:
        raise UnavailableError("krun is root: set HBONE_SSH_USER=root, or to another user of the image")
    entry, uid = _entry(setting, own)
    if own not in (0, uid):
        raise UnavailableError(f"HBONE_SSH_USER={setting}: krun is user {own}, not root, and can be no other")
    shell = _shell(_of(entry) if entry else "")
    if entry is None:
        gid = os.getegid() if uid == own else uid
        return Login(str(uid), uid, gid, (), "/", shell, uid == own, False, False)
    groups = () if uid == own else tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    gid = os.getegid() if uid == own else entry.pw_gid
    return Login(entry.pw_name, uid, gid, groups, entry.pw_dir, shell, uid == own, True, shell == _of(entry))


def _entry(setting: str, own: int) -> tuple[pwd.struct_passwd | None, int]:
    try:
        if setting and not setting.isdigit():
            found = pwd.getpwnam(setting)
            return found, found.pw_uid
        uid = int(setting) if setting else own
        return pwd.getpwuid(uid), uid
    except KeyError:
        if setting and not setting.isdigit():
            raise UnavailableError(f"HBONE_SSH_USER={setting}: the image has no such user") from None
        return None, uid


def _of(entry: pwd.struct_passwd) -> str:
    return entry.pw_shell or "/bin/sh"  # passwd(5)


def _shell(of_user: str) -> str:
    if of_user.rpartition("/")[2] in _NO_SHELLS:
        of_user = ""
    return next((shell for shell in (of_user, *SHELLS) if shell and os.access(shell, os.X_OK)), "")


def environment(user: Login, app: Mapping[str, str]) -> dict[str, str]:
    """A session's, made of what the app gets (`agent.launch.app_environment`)."""
    home = app.get("HOME", "") if user.is_own else ""
    told = {
        **app,
        "HOME": home if os.path.isdir(home) else user.home,
        "USER": user.name,
        "LOGNAME": user.name,
    }
    told.setdefault("PATH", PATH)
    if user.shell:
        told["SHELL"] = user.shell
    return told


def allowed(sent: Mapping[str, str]) -> dict[str, str]:
    """Of the variables that a client has sent those that it may set."""
    return {
        name: value
        for name, value in sent.items()
        if name.startswith(FROM_CLIENTS) and "\0" not in name + value and "=" not in name
    }


def become(user: Login) -> None:
    """In a child, before it executes a program: gives up what `user` does not have."""
    if not user.is_own:
        os.setgroups(user.groups)
        os.setgid(user.gid)
        os.setuid(user.uid)
