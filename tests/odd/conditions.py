"""The odd machines and shells that tests have to pass on, one condition each, and how to make it here.

A condition changes one thing that a developer's machine, or a CI's, may have otherwise. The tests that it
names are those that this thing can touch. Each can tell whether it is in effect (`proof`), so none passes for
having changed nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import checkout
from tests.support.checkout import ROOT

PROCESSES = (
    *("tests/agent/test_app.py", "tests/agent/launch/test_launcher.py", "tests/agent/mtls/test_envoy.py"),
    *(
        "tests/gateway/test_app.py",
        "tests/gateway/workers/test_parent.py",
        "tests/gateway/config/test_reload.py",
    ),
    *("tests/hbone/test_proxy_command.py", "tests/hbone/test_stdio.py", "tests/hbone/demo"),
    *("tests/path/test_ssh.py", "tests/path/test_demo.py", "tests/test_surroundings.py"),
    *("tests/test_start.py", "tests/shared/test_loop.py"),
)
"""Those that start our commands, signal them and read what they say."""

TEXTS = (
    *("tests/test_house.py", "tests/deploy", "tests/bench", "tests/fuzz", "tests/shared/ops"),
    *(
        "tests/gateway/test_cli.py",
        "tests/gateway/config/test_config.py",
        "tests/gateway/config/test_yaml_nodes.py",
    ),
    *("tests/hbone/test_cli.py", "tests/hbone/test_certs.py", "tests/hbone/test_target.py"),
    *("tests/hbone/test_token_choice.py", "tests/hbone/test_token_command.py", "tests/agent/test_cli.py"),
    *(
        "tests/agent/config/test_settings.py",
        "tests/agent/config/test_variables.py",
        "tests/test_secrets_search.py",
    ),
    *(
        "tests/shared/credentials",
        "tests/shared/trust",
        "tests/shared/http2/test_header_rules.py",
        "tests/hbone/cloudrun",
    ),
)
"""Those that read and write files and texts, and show times."""

FILES = (
    *("tests/shared/credentials", "tests/shared/trust", "tests/shared/net/tls", "tests/shared/ops"),
    *("tests/shared/test_atomic_files.py", "tests/agent/identity/test_token_files.py"),
    *(
        "tests/agent/identity/test_certificates.py",
        "tests/agent/mtls/test_inbound.py",
        "tests/agent/test_app.py",
    ),
    *("tests/hbone/cloudrun", "tests/hbone/demo", "tests/hbone/test_certs.py", "tests/path/test_ssh.py"),
    *("tests/path/test_own_certificates.py", "tests/path/test_demo.py", "tests/test_secrets_search.py"),
)
"""Those that make files whose modes, owners and places matter."""

NETWORK = ("tests/shared/net", "tests/gateway", "tests/agent", "tests/shared/ops/test_http_server.py")
"""Those that open sockets in their own process."""

CLOCKS = (
    *(
        "tests/shared/net",
        "tests/gateway",
        "tests/agent/tunnels/test_reverse.py",
        "tests/agent/identity/test_token_files.py",
    ),
    *(
        "tests/shared/credentials",
        "tests/shared/trust",
        "tests/shared/ops",
        "tests/hbone/cloudrun",
        "tests/shared/http2",
    ),
)
"""Those that compare times."""

OTHERS_PROGRAMS = (
    *("tests/path/test_curl.py", "tests/path/test_app_proxy_clients.py", "tests/path/test_retries.py"),
    *("tests/path/test_token_policies.py", "tests/path/test_token_exchange.py"),
    *(
        "tests/hbone/cloudrun",
        "tests/agent/identity/test_sts_server.py",
        "tests/shared/credentials/kubernetes",
    ),
)
"""Those in which programs that are not ours ask over HTTP."""

PROGRAMS = (
    *("curl", "openssl", "ssh", "sshd", "scp", "ssh-keygen", "nghttp", "nghttpd", "nghttpx", "h2load"),
    *("haproxy", "cc", "gcc", "go", "etcd"),
)
"""Those that tests talk to."""

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env")
"""What setpriv itself starts is still looked up with root's capabilities; env has none."""

GENEROUS_S = "400"
"""pytest's --timeout where everything is slower."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A place to run a command in, in which a condition holds."""

    wrap: Callable[[Sequence[str]], list[str]] = list
    """Makes of a command the one that runs it under the condition."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Added to our own environment."""

    python: str = sys.executable
    folder: Path = ROOT
    """The checkout."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What is changed, and what has to hold all the same."""

    what: str
    tests: tuple[str, ...]
    proof: str
    """Python that ends with an error unless the condition is in effect."""

    make: Callable[[Path], AbstractContextManager[Changed]]
    """Brings it about, with a folder for what it needs."""

    lacks: Callable[[], str] = lambda: ""
    """What is missing here to bring it about; empty: nothing."""

    flags: tuple[str, ...] = ()
    """More of pytest's."""


def _shell(before: str, *outer: str, **environ: str) -> Callable[[Path], AbstractContextManager[Changed]]:
    """A shell that does `before` and makes way for the command; `outer` starts the shell."""

    @contextmanager
    def make(_: Path) -> Iterator[Changed]:
        yield Changed(lambda command: [*outer, "sh", "-c", f'{before}\nexec "$@"', "sh", *command], environ)

    return make


def _environ(**environ: str) -> Callable[[Path], AbstractContextManager[Changed]]:
    @contextmanager
    def make(_: Path) -> Iterator[Changed]:
        yield Changed(environ=environ)

    return make


def _locale(name: str, charset: str) -> Callable[[Path], AbstractContextManager[Changed]]:
    """A locale that need not be installed."""

    @contextmanager
    def make(folder: Path) -> Iterator[Changed]:
        full = f"{name}.{charset}"
        subprocess.run(["localedef", "-i", name, "-f", charset, folder / full], check=True)
        yield Changed(environ={"LOCPATH": str(folder), "LC_ALL": full})

    return make


@contextmanager
def _long_folder(folder: Path) -> Iterator[Changed]:
    long = folder / "/".join(["a-folder-with-a-name-that-is-long-enough"] * 4)
    long.mkdir(parents=True)
    yield Changed(environ={"TMPDIR": str(long)})


@contextmanager
def _full_tmp(folder: Path) -> Iterator[Changed]:
    fill = "mount -t tmpfs -o size=64k tmpfs /tmp && { head -c 1M /dev/zero >/tmp/full 2>/dev/null; true; }"
    with _shell(fill, "unshare", "--mount")(folder) as changed:
        yield Changed(changed.wrap, {"TMPDIR": str(folder)})


@contextmanager
def _bare(folder: Path) -> Iterator[Changed]:
    """Something that cannot be run in the place of each program."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    found = {os.path.realpath(there) for name in PROGRAMS if (there := shutil.which(name, path=path))}
    hide = " && ".join(f"mount --bind /dev/null {shlex.quote(there)}" for there in sorted(found)) or "true"
    with _shell(f"{hide} || exit 1", "unshare", "--mount")(folder) as changed:
        yield changed


@contextmanager
def _terminal(_: Path) -> Iterator[Changed]:
    yield Changed(lambda command: ["script", "-qec", shlex.join(command), "/dev/null"])


@contextmanager
def _busy(_: Path) -> Iterator[Changed]:
    # They give way to whoever else works on the machine, and the tests give way to them.
    spin = ["nice", "-n", "5", sys.executable, "-c", "import signal; signal.alarm(7200)\nwhile True: pass"]
    others = [subprocess.Popen(spin) for _ in range(2)]
    try:
        yield Changed(lambda command: ["nice", "-n", "10", *command])
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextmanager
def _nobody(folder: Path) -> Iterator[Changed]:
    """A copy of the checkout, with a virtual environment of a Python that everybody may run."""
    copy = folder / "checkout"
    checkout.copy_to(copy)
    home = folder / "home"
    home.mkdir()
    folder.chmod(0o755)
    python = copy / ".venv" / "bin" / "python"
    subprocess.run([_public_python(), "-m", "venv", copy / ".venv"], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-e", ".[envoy,dev]"], cwd=copy, check=True)
    for path in (home, copy, *copy.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    yield Changed(
        lambda command: [*AS_NOBODY, *command],
        {
            **{"HOME": str(home), "TMPDIR": str(home), "USER": "nobody", "LOGNAME": "nobody"},
            "PATH": "/usr/local/bin:/usr/bin:/bin",  # ours may have folders that are closed to others
        },
        str(python),
        copy,
    )


def _public_python() -> str:
    """A Python that user nobody can run, with what makes virtual environments; empty if there is none."""
    for python in (sys.executable, "/usr/bin/python3"):
        asked = [*AS_NOBODY, python, "-c", "import ensurepip, asyncio"]
        if subprocess.run(asked, cwd="/", capture_output=True).returncode == 0:
            return python
    return ""


# What is missing here.


def _programs(*names: str) -> Callable[[], str]:
    return lambda: ", ".join(name for name in names if shutil.which(name) is None)


def _root(*programs: str) -> Callable[[], str]:
    return lambda: "root" if os.geteuid() else _programs(*programs)()


def _locales(name: str) -> Callable[[], str]:
    def lacks() -> str:
        there = shutil.which("localedef") and Path("/usr/share/i18n/locales", name).exists()
        return "" if there else "localedef and its sources (Debian: locales)"

    return lacks


def _time_namespaces() -> str:
    if os.geteuid():
        return "root"
    tried = subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "time namespaces (Linux 5.6, util-linux 2.36)"


def _account() -> str:
    lacks = _root("setpriv", "git")()
    if not lacks and not _public_python():
        return "a Python that user nobody can run (Debian: python3-venv)"
    return lacks


def _other_tmp() -> str:
    hidden = [path for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if path.is_relative_to("/tmp")]
    return f"a checkout and a Python outside of /tmp, where {hidden[0]} is" if hidden else _root("unshare")()


_PROXY = "http://127.0.0.1:9"
_PROXIES = {
    name: _PROXY
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
}

_NO_IPV6 = (
    "ip link set lo up && for one in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 >$one; done || exit 1"
)

CONDITIONS = {
    "signals": Condition(
        "SIGHUP, SIGINT, SIGQUIT and SIGTERM are inherited as ignored",
        PROCESSES,
        "import signal; assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN",
        _shell("trap '' HUP INT QUIT TERM"),
    ),
    "c-locale": Condition(
        "the locale is C", TEXTS, "import sys; assert sys.flags.utf8_mode", _environ(LC_ALL="C")
    ),
    "turkish": Condition(
        "the locale is Turkish, in which i is no small I",
        TEXTS,
        "import locale; assert locale.setlocale(locale.LC_ALL, '') == 'tr_TR.UTF-8'",
        _locale("tr_TR", "UTF-8"),
        _locales("tr_TR"),
    ),
    "latin-1": Condition(
        "the locale is German, in Latin-1",
        TEXTS,
        "import locale; assert locale.getpreferredencoding() == 'ISO-8859-1'",
        _locale("de_DE", "ISO-8859-1"),
        _locales("de_DE"),
    ),
    "time-zone": Condition(
        "the time zone is that of the Chatham Islands, 12:45 from UTC and 13:45 in summer",
        (
            *TEXTS,
            "tests/agent/identity/test_certificates.py",
            "tests/shared/credentials/certificates/test_certificates_in_use.py",
        ),
        "import time; assert time.localtime(1_790_000_000).tm_gmtoff % 3600 == 2700",
        _environ(TZ="<+1245>-12:45<+1345>,M9.5.0/2:45,M4.1.0/3:45"),
    ),
    "umask": Condition(
        "the umask is 077",
        FILES,
        "import os; assert os.umask(0) == 0o077",
        _shell("umask 077"),
    ),
    "proxies": Condition(
        "the environment names proxies, and nobody is there",
        OTHERS_PROGRAMS,
        "import os; assert os.environ['https_proxy'] and os.environ['HTTP_PROXY']",
        _environ(**_PROXIES),
    ),
    "descriptors": Condition(
        "no process may have more than 1024 open files",
        (*NETWORK, "tests/path/test_many_tunnels.py"),
        "import resource; assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)",
        _shell("ulimit -n 1024"),
    ),
    "bare": Condition(
        "none of the programs is installed that tests talk to",
        (*OTHERS_PROGRAMS, *TEXTS, "tests/path", "tests/conformance", "tests/test_needs.py", *NETWORK),
        "import shutil; assert not shutil.which('curl')",
        _bare,
        _root("unshare"),
    ),
    "long-tmpdir": Condition(
        "TMPDIR has a path longer than a Unix socket's may be",
        FILES,
        "import tempfile; assert len(tempfile.gettempdir()) > 150",
        _long_folder,
    ),
    "full-tmp": Condition(
        "/tmp is full, and TMPDIR is another folder",
        FILES,
        "import os; assert os.statvfs('/tmp').f_bavail == 0",
        _full_tmp,
        _other_tmp,
    ),
    "hash-0": Condition(
        "strings have the same hashes in each run",
        (*TEXTS, "tests/gateway", "tests/shared"),
        "import sys; assert not sys.flags.hash_randomization",
        _environ(PYTHONHASHSEED="0"),
    ),
    "hash-4711": Condition(
        "strings have the same hashes in each run, and others",
        (*TEXTS, "tests/gateway", "tests/shared"),
        "import os; assert os.environ['PYTHONHASHSEED'] == '4711'",
        _environ(PYTHONHASHSEED="4711"),
    ),
    "no-stdin": Condition(
        "standard input is closed", PROCESSES, "import sys; assert sys.stdin is None", _shell("exec <&-")
    ),
    "terminal": Condition(
        "standard output is a terminal",
        (*PROCESSES, "tests/shared/ops", "tests/hbone/test_cli.py", "tests/agent/test_cli.py"),
        "import sys; assert sys.stdout.isatty()",
        _terminal,
        _programs("script"),
    ),
    "no-ipv6": Condition(
        "there is no IPv6, and no network but loopback",
        (
            *NETWORK,
            "tests/hbone",
            "tests/path/test_ssh.py",
            "tests/path/test_curl.py",
            "tests/path/test_reverse.py",
        ),
        "import os, socket; s = socket.socket(socket.AF_INET6); assert s.connect_ex(('::1', 1)) == 99",
        _shell(_NO_IPV6, "unshare", "--net"),
        _root("unshare", "ip"),
    ),
    "uptime": Condition(
        "the machine has been up for three years",
        CLOCKS,
        "import time; assert time.monotonic() > 90_000_000",
        _shell("", "unshare", "--time", "--monotonic", "94608000", "--boottime", "94608000"),
        _time_namespaces,
    ),
    "nobody": Condition(
        "the user is nobody, in a copy of the checkout",
        (*FILES, *PROCESSES, "tests/gateway", "tests/agent", "tests/path/test_curl.py"),
        f"import os; assert os.getuid() == {NOBODY}",
        _nobody,
        _account,
    ),
    "busy": Condition(
        "two busy processes run beside, and have precedence",
        (*CLOCKS, "tests/agent", "tests/hbone/test_proxy_command.py", "tests/path/test_ssh.py"),
        "import os; assert os.nice(0) >= 10",
        _busy,
        _programs("nice"),
        ("--timeout", GENEROUS_S),
    ),
}
"""By name; together an hour on two cores."""
