"""What a test run takes from the machine and the shell that it was started in: as little as can be.

A pytest plugin. Kept away from tests and their children are signals that are ignored or blocked (nohup, a
shell's background job), proxies, the settings of our own commands and of the programs that tests run, and the
user's home with its configuration files; and of open files there may be as many as the machine allows.
krun's ports for operators are off. Compiled modules are kept whatever the shell says: a run without them
compiles the product for every process that it starts, and takes twice as long. What users of the product may
well have stays as it is: locale, time zone, umask, hard limits, a large uptime.
`make test-odd` changes one after the other.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile

import pytest

from shared import open_files

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Those that tests send."""

_UNWANTED = re.compile(
    r"(?i:\w*_proxy)"
    # Of our commands; HBONE_TEST_ is said by test runs to themselves.
    r"|(?!HBONE_TEST_)(?:HBONE|PORT|CAROOT|CLUSTER|PROJECT|MCON|TRUST|WORKLOAD|KUBERNETES|GOOGLE|GCE)_\w+"
    r"|startupProbe\.\w+|MESH|XDS_ADDR|CA_ADDR|CA_POOL|ENVOY_BIN|ENVOY_LOG_LEVEL|PROXY_CONFIG|ISTIO_\w+|K_SERVICE|K_REVISION|GRPC_XDS_BOOTSTRAP|OUTBOUND_\w+|KUBECONFIG|NO_GCE_CHECK|CLOUDSDK_\w+"
    # Of the programs that tests run.
    r"|PYTHONDONTWRITEBYTECODE|SSLKEYLOGFILE|SSL_CERT_\w+|OPENSSL_\w+|CURL_\w+|XDG_C(?:ONFIG|ACHE)_HOME|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|TMUX\w*|SSH_\w+"
)

_home = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def without_settings(environ: dict[str, str]) -> dict[str, str]:
    """`environ` without what is kept away from tests."""
    return {name: value for name, value in environ.items() if not _UNWANTED.fullmatch(name)}


def end_inheritance() -> None:
    """Gives children the default for signals that we were told to ignore, which we go on to ignore: a handler
    is not inherited by a program, SIG_IGN is (execve(2))."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _ignore(_number: int, _frame: object) -> None:
    pass


OWN_PORTS = {"HBONE_HEALTH": "-", "HBONE_METRICS": "-", "HBONE_ADMIN": "-"}
"""For each krun that a test starts without saying otherwise: many run at once, and these ports are fixed."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    end_inheritance()
    open_files.allow_many()
    if caches := os.environ.get("XDG_CACHE_HOME"):  # what tests have built stays where it is (tests.needs)
        os.environ.setdefault("HBONE_TEST_CACHE", os.path.join(caches, "hbone-tests"))
    for name in set(os.environ) - set(without_settings(dict(os.environ))):
        del os.environ[name]
    os.environ.update(OWN_PORTS)
    sys.dont_write_bytecode = False
    config.stash[_home] = tempfile.TemporaryDirectory(prefix="home-")
    os.environ["HOME"] = config.stash[_home].name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_home].cleanup()
