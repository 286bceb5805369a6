"""How ID tokens are to be had: what can be set, from the environment and from the gateway's file.

Owned here: the names, their defaults and what a wrong value says. Which source that comes to is `minters`'
matter, the section `tokens:` of the gateway's file `gateway/config/token_settings.py`'s. The original's names
keep their meaning (PROJECT_ID, CLUSTER_NAME and so on), Google's own as well; what is new begins with HBONE_.

A variable that is set but empty counts as not set, for that is how manifests switch one off.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from shared.errors import UsageError

if TYPE_CHECKING:
    from shared.net.http1 import Target

T = TypeVar("T")

Source = Literal["auto", "metadata", "google", "gke"]
SOURCES: tuple[Source, ...] = get_args(Source)

DEFAULT_METADATA_HOST = "metadata.google.internal"

METADATA_TIMEOUT_S = 3.0
"""GCE_METADATA_TIMEOUT's default in Google's own libraries."""

GCLOUD_FILE = "application_default_credentials.json"
"""What `gcloud auth application-default login` writes into its folder."""

NAMESPACE_PREFIX = "identitynamespace:"
"""How Google's STS calls GKE's identity namespaces."""

MAX_STEP_S = 60.0
"""The longest that one step may be given: a token that takes longer comes too late for any client."""

# What gets into URLs and bodies of requests, so nothing that would mean something else there. Compiled only
# for what is set: most have set nothing, and ssh users wait.
_ACCOUNT = r"[A-Za-z0-9._+-]{1,128}@[A-Za-z0-9.-]{1,253}|[0-9]{1,32}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,127}"
_NUMBER = r"[0-9]{1,32}"
_AUDIENCE = r"(?://iam\.googleapis\.com/|identitynamespace:)[A-Za-z0-9._:/@-]{1,512}"
_JWT = r"eyJ[A-Za-z0-9_-]*\."

ENVIRONMENT: dict[str, str] = {
    "HBONE_TOKENS": "where ID tokens come from: auto, metadata, google or gke (auto)",
    "HBONE_TOKEN_ACCOUNT": "e-mail of the Google service account that tokens are for (the source's own)",
    "HBONE_TOKEN_STEP_TIMEOUT": "seconds each step towards a token may take (5)",
    "HBONE_SUBJECT_TOKEN": "file with a projected Kubernetes token, for gke (none)",
    "HBONE_STS_AUDIENCE": "audience of the token exchange (the cluster's in its identity namespace)",
    "HBONE_STS_URL": "Google's token exchange (https://sts.googleapis.com/v1/token)",
    "HBONE_IAM_URL": "Google's IAM credentials service (https://iamcredentials.googleapis.com)",
    "HBONE_OAUTH_URL": "Google's OAuth token endpoint (https://oauth2.googleapis.com/token)",
    "GOOGLE_APPLICATION_CREDENTIALS": "file with Google credentials (none)",
    "CLOUDSDK_CONFIG": "gcloud's folder (~/.config/gcloud)",
    "GCE_METADATA_HOST": "host of the metadata server (metadata.google.internal)",
    "GCE_METADATA_TIMEOUT": "seconds the metadata server may take (3)",
    "PROJECT_ID": "Google project of the cluster",
    "PROJECT_NUMBER": "its number",
    "CLUSTER_NAME": "GKE cluster whose tokens are exchanged",
    "CLUSTER_LOCATION": "region or zone of the cluster",
}
"""Every name that `from_env` reads, each with its meaning and its default."""


HIDDEN = frozenset(name for name in ENVIRONMENT if name.endswith("_URL")) | {
    "HBONE_SUBJECT_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CLOUDSDK_CONFIG",
}
"""Whose wrong values are not shown: a URL may have a password, and who takes a key or a token for its file's
path has it here."""

SHOWN_CHARS = 60
"""How much of another wrong value is shown."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Everything that sources of tokens can be told."""

    source: Source = "auto"
    """`auto` takes what the machine has (`minters.make_minter`)."""

    service_account: str = ""
    """E-mail of the Google service account that the tokens are to be for, by impersonation; empty: the
    source's own, which for `gke` is the mesh's data plane account."""

    metadata_host: str = DEFAULT_METADATA_HOST
    """HOST or HOST:PORT. With another than Google's it is not tried out whether there is one."""

    metadata_timeout_s: float = METADATA_TIMEOUT_S
    """For one request to it."""

    step_timeout_s: float = 5.0
    """For one exchange with another service, name lookup included; the original's. A token may take three:
    a client's handshake has 10 s, and all but the first of an hour is refreshed ahead of need."""

    credentials: Path | None = None
    """GOOGLE_APPLICATION_CREDENTIALS: a JSON file with a key or a configuration of federation."""

    gcloud: Path | None = None
    """gcloud's file, which need not exist; None: not looked for."""

    subject_token: Path | None = None
    """A file with a Kubernetes token for the audience `trust_domain`, kept current by the kubelet."""

    sts_audience: str = ""
    """`//iam.googleapis.com/projects/.../workloadIdentityPools/...`; empty: the cluster's."""

    project_id: str = ""
    project_number: str = ""
    cluster_name: str = ""
    cluster_location: str = ""

    sts_url: str = "https://sts.googleapis.com/v1/token"
    iam_url: str = "https://iamcredentials.googleapis.com"
    oauth_url: str = "https://oauth2.googleapis.com/token"

    @property
    def trust_domain(self) -> str:
        """GKE's name for the project's workloads, empty without a project."""
        return f"{self.project_id}.svc.id.goog" if self.project_id else ""

    @property
    def exchange_audience(self) -> str:
        """Whom the exchange is for: what is set, or the cluster's place in its identity namespace; empty when
        something of that is missing."""
        if self.sts_audience:
            return self.sts_audience
        if not (self.project_id and self.cluster_name and self.cluster_location):
            return ""
        return (
            f"{NAMESPACE_PREFIX}{self.trust_domain}:https://container.googleapis.com/v1/projects/"
            f"{self.project_id}/locations/{self.cluster_location}/clusters/{self.cluster_name}"
        )

    @property
    def subject_audience(self) -> str:
        """The audience that the Kubernetes token has to have: the trust domain of the identity namespace, or
        of a pool's provider its URL, which it takes unless it is told others."""
        audience = self.exchange_audience
        if audience.startswith(NAMESPACE_PREFIX):
            return audience.removeprefix(NAMESPACE_PREFIX).partition(":")[0]
        return f"https:{audience}" if audience.startswith("//") else audience

    @property
    def exchange_account(self) -> str:
        """Whom the exchange ends at: the set service account, or the project's account of the mesh's data
        plane, which the original uses; empty when neither is known."""
        if self.service_account:
            return self.service_account
        if not self.project_number:
            return ""
        return f"service-{self.project_number}@gcp-sa-meshdataplane.iam.gserviceaccount.com"


def from_env(environ: Mapping[str, str], default: TokenSettings | None = None) -> TokenSettings:
    """Reads the settings from `environ`; what is not set there is as in `default`.

    Raises UsageError for the first value that is wrong.
    """
    base = TokenSettings() if default is None else default

    def read(name: str, parse: Callable[[str], T], otherwise: T) -> T:
        text = environ.get(name, "").strip()
        if not text:
            return otherwise
        try:
            return parse(text)
        except ValueError as error:
            raise UsageError(f"invalid {name}{shown(name, text)} ({error})") from None

    gcloud = read("CLOUDSDK_CONFIG", file_path, None) or _home_folder(environ)
    return TokenSettings(
        source=read("HBONE_TOKENS", source, base.source),
        service_account=read("HBONE_TOKEN_ACCOUNT", service_account, base.service_account),
        metadata_host=read("GCE_METADATA_HOST", metadata_host, base.metadata_host),
        metadata_timeout_s=read("GCE_METADATA_TIMEOUT", seconds, base.metadata_timeout_s),
        step_timeout_s=read("HBONE_TOKEN_STEP_TIMEOUT", seconds, base.step_timeout_s),
        credentials=read("GOOGLE_APPLICATION_CREDENTIALS", file_path, base.credentials),
        gcloud=gcloud / GCLOUD_FILE if gcloud else base.gcloud,
        subject_token=read("HBONE_SUBJECT_TOKEN", file_path, base.subject_token),
        sts_audience=read("HBONE_STS_AUDIENCE", sts_audience, base.sts_audience),
        project_id=read("PROJECT_ID", name_of_google, base.project_id),
        project_number=read("PROJECT_NUMBER", project_number, base.project_number),
        cluster_name=read("CLUSTER_NAME", name_of_google, base.cluster_name),
        cluster_location=read("CLUSTER_LOCATION", name_of_google, base.cluster_location),
        sts_url=read("HBONE_STS_URL", endpoint, base.sts_url),
        iam_url=read("HBONE_IAM_URL", endpoint, base.iam_url),
        oauth_url=read("HBONE_OAUTH_URL", endpoint, base.oauth_url),
    )


def shown(name: str, text: str, hidden: Collection[str] = HIDDEN) -> str:
    """What of a wrong value is told, in one line: nothing of those in `hidden`."""
    if name in hidden:
        return ""
    cut = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    return f"={cut if cut.isprintable() else ascii(cut)}"


def _home_folder(environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HOME", "")
    return Path(home) / ".config" / "gcloud" if home else None


# How each kind of value is read. Raises ValueError, whose text has nothing of the value.


def source(text: str) -> Source:
    """One of SOURCES."""
    for known in SOURCES:
        if known == text.lower():
            return known
    raise ValueError(f"choose one of {', '.join(SOURCES)}")


def endpoint(text: str) -> str:
    """The URL of a service that gets tokens of ours: https, but for addresses of this machine."""
    target = target_of(text)
    if "?" in text or "#" in text:
        raise ValueError("URL with a query or fragment")
    if target.scheme != "https" and not is_own_machine(target.host):
        raise ValueError("has to be https: it gets tokens that others could read on their way")
    return text.rstrip("/")


def target_of(url: str) -> Target:
    """Where a URL leads. Raises ValueError, unlike `Target.parse` without anything of the URL in its text but
    the scheme."""
    from shared.net.http1 import Target  # as long as nobody sets one, nobody needs it

    try:
        return Target.parse(url)
    except ValueError as error:
        reason = str(error)
        # Python's own texts quote what they could not read.
        raise ValueError(reason if reason.startswith("URL ") else "URL that cannot be read") from None


def is_there(path: Path | None) -> bool:
    """Whether there is such a file, as far as we may look: a folder that is closed to us is no error, as it
    would be with `Path.exists`."""
    return path is not None and os.path.exists(path)


def is_own_machine(host: str) -> bool:
    """Whether `host` is a loopback address, or `localhost`, to which things may be said in the clear."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def metadata_host(text: str) -> str:
    """HOST or HOST:PORT."""
    try:
        if target_of(f"http://{text}/").authority == text:
            return text
    except ValueError:
        pass
    raise ValueError("has to be HOST or HOST:PORT")


def service_account(text: str) -> str:
    """A service account's e-mail address, or its number."""
    return _matched(_ACCOUNT, text, "has to be a service account's e-mail address")


def name_of_google(text: str) -> str:
    """The name of a project, a cluster or a place."""
    return _matched(_NAME, text, "has to be a name of letters, digits and hyphens")


def project_number(text: str) -> str:
    """A project's number."""
    return _matched(_NUMBER, text, "has to be a number")


def sts_audience(text: str) -> str:
    """`//iam.googleapis.com/...` or `identitynamespace:TRUSTDOMAIN:URL`."""
    return _matched(_AUDIENCE, text, "begins with //iam.googleapis.com/ or identitynamespace:")


def file_path(text: str) -> Path:
    """A file's path."""
    if text.startswith("{") or re.match(_JWT, text) or not text.isprintable():
        raise ValueError("has to be a file's path; this looks like what should be in the file")
    return Path(text)


def seconds(text: str) -> float:
    """A number of seconds, more than 0 and at most MAX_STEP_S."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("not a number of seconds") from None
    if not 0 < value <= MAX_STEP_S:
        raise ValueError(f"has to be more than 0 and at most {MAX_STEP_S:g} seconds")
    return value


def _matched(pattern: str, text: str, reason: str) -> str:
    if re.fullmatch(pattern, text) is None:
        raise ValueError(reason)
    return text
