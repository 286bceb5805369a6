"""Settings of krun about what kubelet would mount: Secrets and ConfigMaps in files and in the app's
variables, and references in the values of these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from agent.config import mesh_settings
from agent.config.certificate_settings import CertificateSettings
from agent.config.kubernetes_settings import ACCESS, KubernetesSettings
from agent.config.variables import OWNER
from shared.config.fields import Environment, setting, table_of
from shared.config.kinds import Duration, Parsed, Switch, words
from shared.credentials.kubernetes.kubernetes_names import check_object_name
from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST, ENDPOINT

Kind = Literal["secret", "configmap"]

KINDS: dict[str, Kind] = {
    "secret": "secret",
    "secrets": "secret",
    "configmap": "configmap",
    "configmaps": "configmap",
    "cm": "configmap",
}
"""As kubectl accepts them."""

OPTIONAL = "optional"

MAX_OBJECTS = 32
"""Secrets and ConfigMaps in one setting: a pod has a handful."""

MAX_PREFIX_CHARS = 63

REFERENCE_PREFIXES = ("sm://", "berglas://", "$SecretKeyRef:", "$ConfigMapKeyRef:")
"""What values that stand for others begin with: berglas' forms, then konfig's."""


class ObjectName(NamedTuple):
    """A Secret or a ConfigMap of some namespace."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def resource(self) -> str:
        """What RBAC and the API server's paths call its kind."""
        return f"{self.kind}s"


class Mount(NamedTuple):
    """An object whose values are to be files."""

    object: ObjectName
    folder: Path
    optional: bool
    """It may be missing, as with kubelet's `optional: true`."""


class EnvFrom(NamedTuple):
    """An object whose values are to be variables of the app."""

    object: ObjectName
    prefix: str
    """Of their names."""
    optional: bool


def is_reference(value: str) -> bool:
    """Whether a variable's value stands for another one."""
    return value.startswith(REFERENCE_PREFIXES)


def _object(text: str) -> ObjectName:
    kind, slash, name = text.partition("/")
    if not slash or kind not in KINDS:
        raise ValueError(f"{text[:60]!r} is neither secret/NAME nor configmap/NAME")
    return ObjectName(KINDS[kind], check_object_name(name))


def _mounts(text: str) -> tuple[Mount, ...]:
    mounts = tuple(_mount(word) for word in words(text, MAX_OBJECTS))
    if len({mount.folder for mount in mounts}) < len(mounts):
        raise ValueError("one folder for two objects")
    return mounts


def _mount(word: str) -> Mount:
    name, _, rest = word.partition(":")
    path, _, mark = rest.partition(":")
    folder = os.path.normpath(path)
    if not path.startswith("/") or folder.strip("/") == "" or ".." in Path(path).parts:
        raise ValueError(f"{word[:60]!r} is no KIND/NAME:/FOLDER")
    return Mount(_object(name), Path(folder), _is_optional(mark))


def _env_from(text: str) -> tuple[EnvFrom, ...]:
    return tuple(_source(word) for word in words(text, MAX_OBJECTS))


def _source(word: str) -> EnvFrom:
    prefix, _, rest = word.rpartition("=")
    name, _, mark = rest.partition(":")
    if len(prefix) > MAX_PREFIX_CHARS or (prefix and not prefix.replace("_", "a").isalnum()):
        raise ValueError(f"a prefix has letters, digits and _, and {MAX_PREFIX_CHARS} of them at most")
    return EnvFrom(_object(name), prefix, _is_optional(mark))


def _is_optional(mark: str) -> bool:
    if mark not in ("", OPTIONAL):
        raise ValueError(f"{mark[:60]!r} is not {OPTIONAL}")
    return mark == OPTIONAL


@dataclass(frozen=True, slots=True)
class MountSettings:
    """All about it. By default nothing is asked for but the references that the app's variables have."""

    mounts: tuple[Mount, ...] = setting(
        Parsed(_mounts, "KIND/NAME:/FOLDER[:optional], with commas between them"),
        (),
        "Secrets and ConfigMaps to keep in files: secret/NAME:/FOLDER, configmap/NAME:/FOLDER",
        "They are those of the workload's namespace. With :optional one may be missing.",
        unset="none",
        variable="HBONE_MOUNTS",
    )
    env_from: tuple[EnvFrom, ...] = setting(
        Parsed(_env_from, "[PREFIX=]KIND/NAME[:optional], with commas between them"),
        (),
        "Secrets and ConfigMaps whose keys are variables of the app: secret/NAME, PREFIX=configmap/NAME",
        "They are read once. A later one goes over an earlier one, and the app's own variables go over all.",
        unset="none",
        variable="HBONE_ENV_FROM",
    )
    owner: tuple[int, int] | None = setting(
        OWNER,
        None,
        "USER or USER:GROUP that the files are given to",
        "The app is krun's own user unless its image says otherwise.",
        unset="krun's own",
        variable="HBONE_MOUNT_OWNER",
    )
    refresh_s: float = setting(
        Duration(0.1, 86400),
        60.0,
        "time after which the files are compared with the cluster's objects",
        "Less a random tenth. kubelet takes about a minute.",
        variable="HBONE_MOUNT_REFRESH",
    )
    start_timeout_s: float = setting(
        Duration(0.1, 3600),
        30.0,
        "time that files, variables and references may take, before the app is started",
        variable="HBONE_MOUNT_TIMEOUT",
    )
    references: bool = setting(
        Switch(),
        True,
        "0: values like sm://PROJECT/NAME reach the app as they are",
        "For an app that resolves them itself.",
        variable="HBONE_REFERENCES",
    )
    secret_manager_url: str = setting(
        ENDPOINT,
        "https://secretmanager.googleapis.com",
        "Google's Secret Manager",
        variable="HBONE_SECRET_MANAGER_URL",
        secret=True,
    )
    storage_url: str = setting(
        ENDPOINT,
        "https://storage.googleapis.com",
        "Google's Cloud Storage",
        variable="HBONE_STORAGE_URL",
        secret=True,
    )
    kms_url: str = setting(
        ENDPOINT,
        "https://cloudkms.googleapis.com",
        "Google's Cloud KMS",
        variable="HBONE_KMS_URL",
        secret=True,
    )
    namespace: str = ""
    """The workload's, WORKLOAD_NAMESPACE; empty: that of the access to the cluster."""

    access: Mapping[str, str] = field(default_factory=dict)
    """How the API server is reached, where MESH names no cluster: the values of ACCESS by variable."""

    metadata_host: str = DEFAULT_METADATA_HOST
    gke_url: str = mesh_settings.GKE_URL.default
    quota_project: str = ""

    @property
    def asks_cluster(self) -> bool:
        """Whether the workload's own cluster is asked."""
        return bool(self.mounts or self.env_from)

    def has_references(self, environ: Mapping[str, str]) -> bool:
        """Whether any value of `environ` is to be resolved."""
        return self.references and any(map(is_reference, environ.values()))


def read(read: Environment) -> MountSettings:
    """The settings that `read` finds. Raises UsageError."""
    return MountSettings(
        namespace=read(table_of(KubernetesSettings)["namespace"]),
        access={one.variable: text for one in ACCESS if (text := read(one))},
        metadata_host=read(table_of(CertificateSettings)["metadata_host"]),
        gke_url=read(mesh_settings.GKE_URL),
        quota_project=read(mesh_settings.QUOTA_PROJECT),
        **read.given(MountSettings),
    )
