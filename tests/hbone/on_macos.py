"""`python tests/hbone/on_macos.py ARGUMENTS`: hbone, in a process that has nothing of Python's that is there
on Linux only, and says that it is on macOS. A look at /proc ends it.

With `--import MODULE...` it imports these modules, and nothing else. What a Mac's kernel and libraries do
otherwise cannot be had here.
"""

from __future__ import annotations

# What hbone stands on is written for both, and finds out what there is when it is imported.
import asyncio  # noqa: F401
import fcntl
import importlib
import os
import re
import resource
import select
import signal
import socket
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys

import uvloop  # noqa: F401

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# By the Availability notes of Python's documentation, and macOS' headers.
LINUX_ONLY = {
    os: r"memfd_create|MFD_\w+|splice|SPLICE_\w+|eventfd\w*|EFD_\w+|timerfd\w*|TFD_\w+|pidfd_\w+|P_PIDFD"
    r"|pipe2|O_PATH|O_TMPFILE|O_DIRECT|O_NOATIME|O_LARGEFILE|O_RSYNC|sched_(?!yield)\w+|posix_fadvise"
    r"|posix_fallocate|POSIX_FADV\w+|getrandom|GRND_\w+|\w*xattr|XATTR_\w+|getres[ug]id|setres[ug]id|copy_file_range|unshare"
    r"|setns|CLONE_\w+|fdatasync|RWF_\w+|fexecve",
    select: r"epoll|EPOLL\w*",
    socket: r"SOCK_(?:NONBLOCK|CLOEXEC)|TCP_(?:INFO|USER_TIMEOUT|QUICKACK|DEFER_ACCEPT|CORK|CONGESTION|SYNCNT"
    r"|LINGER2|WINDOW_CLAMP|NOTSENT_LOWAT)|SO_(?:PEERCRED|BINDTODEVICE|MARK|INCOMING_CPU|DOMAIN|PROTOCOL|PASSCRED"
    r"|PASSSEC|PEERSEC|PRIORITY)|AF_(?:NETLINK|PACKET|ALG|VSOCK|CAN|RDS|TIPC|QIPCRTR|BLUETOOTH)|MSG_(?:ERR"
    r"QUEUE|CMSG_CLOEXEC|CONFIRM|MORE|FASTOPEN)|ALG_\w+|CAN_\w+|NETLINK_\w+|PACKET_\w+|TIPC_\w+|VMADDR_\w+|RDS_\w+"
    r"|IP_(?:TRANSPARENT|BIND_ADDRESS_NO_PORT|FREEBIND)",
    signal: r"sigtimedwait|sigwaitinfo|pidfd_\w+|SIGRT\w+|SIGPOLL|SIGPWR|SIGSTKFLT|SIGCLD",
    fcntl: r"F_(?:SETPIPE_SZ|GETPIPE_SZ|ADD_SEALS|GET_SEALS|OFD_\w+|NOTIFY|SETLEASE|GETLEASE|SETSIG|GETSIG)"
    r"|F_SEAL_\w+|DN_\w+",
    resource: r"prlimit|RLIMIT_(?:MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING|OFILE)|RUSAGE_THREAD",
}


def become_a_mac() -> None:
    """Takes all that away, here and in what C modules the others are made of."""
    for module, names in LINUX_ONLY.items():
        for name in [name for name in vars(module) if re.fullmatch(names, name)]:
            delattr(module, name)
    sys.platform = "darwin"

    def judge(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and re.match(r"/(?:proc|sys)/", str(arguments[0])):
            print(f"on_macos: it opens {arguments[0]}", file=sys.stderr)
            os._exit(70)

    sys.addaudithook(judge)


if __name__ == "__main__":
    sys.path[0] = ROOT
    become_a_mac()
    if sys.argv[1] == "--import":
        for one in sys.argv[2:]:
            importlib.import_module(one)
    else:
        from hbone.__main__ import main

        main()
