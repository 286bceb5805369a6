"""What can be told of this machine alone: versions, credentials, clusters, proxies, ssh.

Nothing is asked over the network.
"""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Mapping
from pathlib import Path

from hbone import token_choice
from hbone.proxy_choice import EXCEPTIONS, VARIABLES
from shared.doctor.failures import Failure
from shared.doctor.far_text import without_user
from shared.doctor.hops import Hop
from shared.doctor.walk import Report, Result, Verdict
from shared.errors import UsageError

SSHDS = ("/usr/sbin/sshd", "/usr/local/sbin/sshd", "/opt/homebrew/sbin/sshd")
"""Where sshd is; it is on nobody's PATH but root's."""


def look(environ: Mapping[str, str]) -> Report:
    """Everything, each line by itself: what is missing keeps nothing else from being looked at."""
    from shared import version

    path = environ.get("PATH")
    return Report(
        "this machine",
        (
            _row("hbone", Verdict.PASS, version.describe("hbone")),
            _token_source(environ),
            _google_credentials(environ.get("GOOGLE_APPLICATION_CREDENTIALS")),
            _kubeconfigs(environ),
            _program("gcloud", path),
            _program("kubectl", path),
            _program("ssh", path, is_needed=True),
            _sshd(),
            _proxies(environ),
            _trusted(),
        ),
    )


def _row(name: str, verdict: Verdict, detail: str, failure: Failure | None = None) -> Result:
    return Result(Hop.MACHINE, verdict, None, detail, failure, name)


def _token_source(environ: Mapping[str, str]) -> Result:
    """Which source of tokens the environment names."""
    try:
        minter = token_choice.minter(environ)
    except UsageError as error:
        return _row("tokens", Verdict.FAIL, str(error), Failure.NO_TOKEN)
    return _row("tokens", Verdict.PASS, f"from {minter.identity}; hbone token gets one")


def _google_credentials(place: str | None) -> Result:
    if not place:
        return _row("credentials", Verdict.SKIP, "GOOGLE_APPLICATION_CREDENTIALS is not set")
    try:
        with open(place, "rb"):
            return _row("credentials", Verdict.PASS, place)
    except OSError as error:
        return _row("credentials", Verdict.FAIL, f"{place}: {error.strerror}", Failure.TOKEN_FILE)


def _kubeconfigs(environ: Mapping[str, str]) -> Result:
    told = environ.get("KUBECONFIG")
    places = told.split(os.pathsep) if told else [str(Path(environ.get("HOME", "/"), ".kube", "config"))]
    there = [place for place in places if place and os.path.isfile(place)]
    if there:
        return _row("kubeconfig", Verdict.PASS, ", ".join(there))
    return _row("kubeconfig", Verdict.SKIP, f"none at {', '.join(places)}: no names of a cluster")


def _program(name: str, path: str | None, *, is_needed: bool = False) -> Result:
    place = shutil.which(name, path=path)
    if place is not None:
        return _row(name, Verdict.PASS, place)
    if is_needed:
        return _row(name, Verdict.FAIL, "not on PATH", Failure.NO_PROGRAM)
    return _row(name, Verdict.SKIP, "not on PATH, and not needed")


def _sshd() -> Result:
    place = next((one for one in SSHDS if os.path.exists(one)), None)
    return _row("sshd", Verdict.SKIP if place is None else Verdict.PASS, place or "none here, none needed")


def _proxies(environ: Mapping[str, str]) -> Result:
    known = (*VARIABLES, *EXCEPTIONS)
    told = [f"{name}={without_user(environ[name])}" for name in known if environ.get(name)]
    if not told:
        return _row("proxy", Verdict.SKIP, "no variable names one")
    return _row("proxy", Verdict.PASS, ", ".join(told))


def _trusted() -> Result:
    """The system's trusted certificates, without which no server is."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile or (paths.capath and os.listdir(paths.capath)):
        return _row("trusted CAs", Verdict.PASS, str(paths.cafile or paths.capath))
    text = "this system has no trusted certificates; see SSL_CERT_FILE"
    return _row("trusted CAs", Verdict.FAIL, text, Failure.CA_FILE)
