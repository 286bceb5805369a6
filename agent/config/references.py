"""References: values of the app's variables that stand for others. The forms are konfig's and berglas'.

- `$SecretKeyRef:/projects/P/locations/L/clusters/C/namespaces/NS/secrets/NAME/keys/KEY[?tempFile=true]`, and
  `$ConfigMapKeyRef:` with `configmaps`: a value in a GKE cluster. The first slash may be missing.
- `sm://PROJECT/NAME[?destination=...][#VERSION]`: a version of a secret in Secret Manager, by default the
  latest.
- `berglas://BUCKET/OBJECT[?destination=...][#GENERATION]`: an object in Cloud Storage, encrypted with a key
  of Cloud KMS.

With `destination=tempfile` or `tmpfile`, or konfig's `tempFile`, the value goes to a file of its own, with
another destination to the file of that path, and the variable has the file's path.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote

from agent.config.mesh_name import GkeName
from agent.config.mesh_name import name as name_of_google
from agent.config.mount_settings import REFERENCE_PREFIXES, Kind, ObjectName
from shared.credentials.kubernetes.kubernetes_names import check_key, check_namespace, check_object_name

SECRET_MANAGER, BERGLAS, SECRET_KEY, CONFIG_MAP_KEY = REFERENCE_PREFIXES

MAX_CHARS = 4096

TEMPORARY = ("tempfile", "tmpfile")
"""Destinations that name no path."""

_CLUSTER_KEY = re.compile(
    r"/?projects/([^/]+)/(?:zones|locations)/([^/]+)/clusters/([^/]+)"
    r"/namespaces/([^/]+)/(secrets|configmaps)/([^/]+)/keys/([^/?#]+)(?:\?([^#]*))?"
)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,221}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{1,255}")
_GENERATION = re.compile(r"[0-9]{1,19}")

MAX_OBJECT_BYTES = 1024
"""Of a name in Cloud Storage, in UTF-8."""

MAX_FIELDS = 16
"""Behind the question mark."""

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A value of a Secret or a ConfigMap of a GKE cluster."""

    cluster: GkeName
    namespace: str
    object: ObjectName
    key: str

    place = "a GKE cluster"


@dataclass(frozen=True, slots=True)
class SecretVersion:
    """A version of a secret in Secret Manager."""

    project: str
    name: str
    version: str
    """A number, an alias or `latest`."""

    place = "Secret Manager"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in Cloud Storage that berglas has encrypted."""

    bucket: str
    name: str
    generation: str
    """A number; empty: the latest."""

    place = "Cloud Storage"


Source = ClusterKey | SecretVersion | StoredObject


@dataclass(frozen=True, slots=True)
class Reference:
    """What a variable's value is to be."""

    source: Source
    temporary: bool = False
    """It is to be in a file that krun names."""
    path: Path | None = None
    """It is to be in this file."""
    suffix: str = ""
    """Of the name of a temporary file: that of the object."""

    def __str__(self) -> str:
        """What it is, for people, without any name in it."""
        in_file = ", into a file" if self.temporary or self.path else ""
        return f"reference to {self.source.place}{in_file}"


def parse(text: str) -> Reference:
    """The reference that `text`, which begins like one, says. Raises ValueError, whose text has nothing of
    it."""
    if len(text) > MAX_CHARS or not text.isprintable():
        raise ValueError(f"it has more than {MAX_CHARS} characters, or some that cannot be printed")
    if text.startswith(SECRET_MANAGER):
        return _of_berglas(text, SECRET_MANAGER, "PROJECT/NAME", _secret_version)
    if text.startswith(BERGLAS):
        return _of_berglas(text, BERGLAS, "BUCKET/OBJECT", _stored_object)
    if text.startswith(SECRET_KEY):
        return _cluster_key(text, SECRET_KEY, "secret")
    if text.startswith(CONFIG_MAP_KEY):
        return _cluster_key(text, CONFIG_MAP_KEY, "configmap")
    raise ValueError("it begins like no reference")


def _of_berglas(text: str, prefix: str, form: str, source: Callable[[str, str, str], Source]) -> Reference:
    """`source` makes the source of owner, name and what is behind #."""
    # As berglas reads them: a URL without a scheme.
    rest, _, fragment = text.removeprefix(prefix).removeprefix("/").partition("#")
    path, _, query = rest.partition("?")
    owner, _, name = unquote(path).partition("/")
    if not name or not owner:
        raise ValueError(f"it has to be {prefix}{form}")
    found, destination = source(owner, name, unquote(fragment)), _first(query, "destination")
    if destination in TEMPORARY:
        return Reference(found, temporary=True, suffix=PurePosixPath(name).suffix)
    if not destination.isprintable():
        raise ValueError("the destination has to be tempfile or the path of a file")
    return Reference(found, path=Path(destination) if destination else None)


def _secret_version(project: str, name: str, version: str) -> SecretVersion:
    if not _SECRET.fullmatch(name) or not _SECRET.fullmatch(version or LATEST):
        raise ValueError("a secret and its version have letters, digits, - and _")
    return SecretVersion(name_of_google(project), name, version or LATEST)


def _stored_object(bucket: str, name: str, generation: str) -> StoredObject:
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("a bucket has lower-case letters, digits, -, _ and dots")
    if len(name.encode()) > MAX_OBJECT_BYTES or not name.isprintable():
        raise ValueError(f"an object's name has {MAX_OBJECT_BYTES} bytes at most, which can be printed")
    if generation and not _GENERATION.fullmatch(generation):
        raise ValueError("a generation is a number")
    return StoredObject(bucket, name, generation)


def _cluster_key(text: str, prefix: str, kind: Kind) -> Reference:
    found = _CLUSTER_KEY.fullmatch(text.removeprefix(prefix))
    if found is None or found[5] != f"{kind}s":
        place = "/projects/P/locations/L/clusters/C/namespaces/NS"
        raise ValueError(f"it has to be {prefix}{place}/{kind}s/NAME/keys/KEY")
    cluster = GkeName(*(name_of_google(found[number]) for number in (1, 2, 3)))
    name = ObjectName(kind, check_object_name(found[6]))
    source = ClusterKey(cluster, check_namespace(found[4]), name, check_key(unquote(found[7])))
    if _first(found[8] or "", "tempFile"):  # any value counts, as with konfig
        return Reference(source, temporary=True, suffix=PurePosixPath(source.key).suffix)
    return Reference(source)


def _first(query: str, name: str) -> str:
    return next(iter(parse_qs(query, max_num_fields=MAX_FIELDS).get(name, ())), "")
