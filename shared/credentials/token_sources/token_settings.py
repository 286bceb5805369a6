"""The settings for ID tokens: names, defaults, and what a wrong value is told.

The original's names keep their meaning (PROJECT_ID, CLUSTER_NAME and so on), and so do Google's; new names
begin with HBONE_. A variable that is set but empty counts as not set, for manifests switch one off like that.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from shared.address import is_own_machine
from shared.config.fields import Environment, setting, table_of
from shared.config.kinds import Choice, Duration, FilePath, Parsed, file_path

if TYPE_CHECKING:
    from shared.net.http1 import Target

Source = Literal["auto", "metadata", "google", "gke", "gcloud"]
SOURCES: tuple[Source, ...] = get_args(Source)

DEFAULT_METADATA_HOST = "metadata.google.internal"

METADATA_TIMEOUT_S = 3.0
"""GCE_METADATA_TIMEOUT's default in Google's own libraries."""

GCLOUD_FILE = "application_default_credentials.json"
"""What `gcloud auth application-default login` writes into its folder."""

NAMESPACE_PREFIX = "identitynamespace:"
"""How Google's STS calls GKE's identity namespaces."""

LEAST_STEP_S = 0.1
"""Less would always fail: looking a name up may take as long."""

MAX_STEP_S = 60.0
"""The longest that one step may be given: a token that takes longer comes too late for any client."""

# What gets into URLs and bodies of requests, so nothing that would mean something else there. Compiled only
# for what is set: most have set nothing, and ssh users wait.
_ACCOUNT = r"[A-Za-z0-9._+-]{1,128}@[A-Za-z0-9.-]{1,253}|[0-9]{1,32}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,127}"
_NUMBER = r"[0-9]{1,32}"
_AUDIENCE = r"(?://iam\.googleapis\.com/|identitynamespace:)[A-Za-z0-9._:/@-]{1,512}"


# How values are read. Each raises ValueError, whose text has nothing of the value.


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


def _matched(pattern: str, text: str, reason: str) -> str:
    if re.fullmatch(pattern, text) is None:
        raise ValueError(reason)
    return text


STEP = Duration(LEAST_STEP_S, MAX_STEP_S)
ENDPOINT = Parsed(endpoint, "https URL")
NAME_OF_GOOGLE = Parsed(name_of_google, "letters, digits and hyphens")
METADATA_HOST = Parsed(metadata_host, "HOST or HOST:PORT")
ACCOUNT = Parsed(service_account, "e-mail address")
AUDIENCE = Parsed(sts_audience, "//iam.googleapis.com/... or identitynamespace:...")
PROJECT_NUMBER = Parsed(project_number, "number")
GCLOUD_FOLDER = Parsed(lambda text: file_path(text) / GCLOUD_FILE, "path of a folder")


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Everything that sources of tokens can be told."""

    source: Source = setting(
        Choice(SOURCES),
        "auto",
        "where ID tokens come from",
        "auto takes what the machine has; the gcloud command only for `hbone`, and after all others.",
        variable="HBONE_TOKENS",
    )
    service_account: str = setting(
        ACCOUNT,
        "",
        "e-mail of the Google service account that tokens are for",
        "They are tokens of this account by impersonation. Of source gke the source's own is the account of "
        "the mesh's data plane.",
        unset="the source's own",
        variable="HBONE_TOKEN_ACCOUNT",
    )
    metadata_host: str = setting(
        METADATA_HOST,
        DEFAULT_METADATA_HOST,
        "host of the metadata server",
        "If it is set, auto does not check whether there is one.",
        variable="GCE_METADATA_HOST",
    )
    metadata_timeout_s: float = setting(
        STEP,
        METADATA_TIMEOUT_S,
        "time that a request to the metadata server may take",
        variable="GCE_METADATA_TIMEOUT",
    )
    step_timeout_s: float = setting(
        STEP,
        5.0,
        "time that each step towards a token may take",
        "A step is one exchange with one service, name look-up included. A token may take three.",
        variable="HBONE_TOKEN_STEP_TIMEOUT",
    )
    credentials: Path | None = setting(
        FilePath(),
        None,
        "file with Google credentials",
        "A key of a service account, or a configuration of federation, impersonation or a user's login.",
        unset="none",
        variable="GOOGLE_APPLICATION_CREDENTIALS",
        secret=True,
    )
    gcloud: Path | None = setting(
        GCLOUD_FOLDER,
        None,
        "gcloud's folder",
        "The file need not exist.",
        unset="~/.config/gcloud",
        variable="CLOUDSDK_CONFIG",
        in_file=False,
        secret=True,
    )
    """gcloud's own file in that folder; None: not looked for."""

    subject_token: Path | None = setting(
        FilePath(),
        None,
        "file with a projected Kubernetes token, for source gke",
        "The token's audience has to be the trust domain PROJECT_ID.svc.id.goog. The kubelet keeps the file "
        "current.",
        unset="none",
        variable="HBONE_SUBJECT_TOKEN",
        secret=True,
    )
    sts_audience: str = setting(
        AUDIENCE,
        "",
        "audience of the token exchange",
        unset="the cluster's in its identity namespace",
        variable="HBONE_STS_AUDIENCE",
    )
    project_id: str = setting(NAME_OF_GOOGLE, "", "Google project of the cluster", variable="PROJECT_ID")
    project_number: str = setting(PROJECT_NUMBER, "", "number of that project", variable="PROJECT_NUMBER")
    cluster_name: str = setting(
        NAME_OF_GOOGLE, "", "GKE cluster whose tokens are exchanged", variable="CLUSTER_NAME"
    )
    cluster_location: str = setting(
        NAME_OF_GOOGLE, "", "region or zone of the cluster", variable="CLUSTER_LOCATION"
    )
    sts_url: str = setting(
        ENDPOINT,
        "https://sts.googleapis.com/v1/token",
        "Google's token exchange",
        variable="HBONE_STS_URL",
        secret=True,
    )
    iam_url: str = setting(
        ENDPOINT,
        "https://iamcredentials.googleapis.com",
        "Google's IAM credentials service",
        variable="HBONE_IAM_URL",
        secret=True,
    )
    oauth_url: str = setting(
        ENDPOINT,
        "https://oauth2.googleapis.com/token",
        "Google's OAuth token endpoint",
        variable="HBONE_OAUTH_URL",
        secret=True,
    )

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


ENVIRONMENT: dict[str, str] = {one.variable: one.line for one in table_of(TokenSettings).values()}
"""Every variable that `from_env` reads, each with its meaning and its default."""


def from_env(environ: Mapping[str, str], default: TokenSettings | None = None) -> TokenSettings:
    """Reads the settings from `environ`; what is not set there is as in `default`, hgate's file.

    Raises UsageError for the first value that is wrong.
    """
    base = TokenSettings() if default is None else default
    given = Environment(environ).given(TokenSettings)
    if "gcloud" not in given and (home := _home_folder(environ)) is not None:
        given["gcloud"] = home / GCLOUD_FILE
    return dataclasses.replace(base, **given)


def _home_folder(environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HOME", "")
    return Path(home) / ".config" / "gcloud" if home else None
