"""References in the values of variables: berglas' and konfig's forms."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.mesh_name import GkeName
from agent.config.mount_settings import REFERENCE_PREFIXES, ObjectName
from agent.config.references import ClusterKey, Reference, SecretVersion, StoredObject, parse

CLUSTER = GkeName("my-project", "us-central1", "c")
IN_CLUSTER = "projects/my-project/locations/us-central1/clusters/c/namespaces/demo"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("sm://proj/name", SecretVersion("proj", "name", "latest")),
        ("sm://example.com:proj/name#12", SecretVersion("example.com:proj", "name", "12")),
        ("sm://proj/name#prod-alias", SecretVersion("proj", "name", "prod-alias")),
        ("berglas://my.bucket/a/b%20c.json", StoredObject("my.bucket", "a/b c.json", "")),
        ("berglas:///bucket/o#1563925940580201", StoredObject("bucket", "o", "1563925940580201")),
        (
            f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db/keys/tls.crt",
            ClusterKey(CLUSTER, "demo", ObjectName("secret", "db"), "tls.crt"),
        ),
        (
            f"$ConfigMapKeyRef:{IN_CLUSTER.replace('locations', 'zones')}/configmaps/env/keys/KEY",
            ClusterKey(CLUSTER, "demo", ObjectName("configmap", "env"), "KEY"),
        ),
    ],
)
def test_forms(text: str, source: object) -> None:
    assert parse(text) == Reference(source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "temporary", "path", "suffix"),
    [
        ("sm://p/n?destination=tempfile", True, None, ""),
        ("berglas://bucket/a/key.json?destination=tmpfile#7", True, None, ".json"),
        ("sm://p/n?destination=/etc/my%20key#7", False, Path("/etc/my key"), ""),
        (f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db/keys/tls.key?tempFile=true", True, None, ".key"),
        (f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db/keys/tls.key?tempFile=", False, None, ""),
        ("sm://p/n?other=1", False, None, ""),
    ],
)
def test_destinations(text: str, temporary: bool, path: Path | None, suffix: str) -> None:
    found = parse(text)
    assert (found.temporary, found.path, found.suffix) == (temporary, path, suffix)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sm://", "has to be sm://PROJECT/NAME"),
        ("sm://proj", "has to be sm://PROJECT/NAME"),
        ("sm://proj/a/b", "a secret and its version have letters"),
        ("sm://proj/a#1/../2", "a secret and its version have letters"),
        ("sm://pr%2Foj/a", "a secret and its version have letters"),
        ("sm://p?x/a", "has to be sm://PROJECT/NAME"),
        ("berglas://bucket", "has to be berglas://BUCKET/OBJECT"),
        ("berglas://Bucket/a", "a bucket has lower-case letters"),
        ("berglas://bucket/a#latest", "a generation is a number"),
        ("berglas://bucket/" + "a" * 1025, "1024 bytes at most"),
        ("sm://p/n?destination=a%00b", "tempfile or the path of a file"),
        (
            f"$ConfigMapKeyRef:/{IN_CLUSTER}/secrets/db/keys/K",
            r"\$ConfigMapKeyRef:/.*/configmaps/NAME/keys/KEY",
        ),
        (f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db/keys/..K", "a key has letters"),
        (f"$SecretKeyRef:/{IN_CLUSTER}/secrets/db", r"\$SecretKeyRef:/.*/secrets/NAME/keys/KEY"),
        (f"$SecretKeyRef:/{IN_CLUSTER.replace('demo', 'De')}/secrets/db/keys/K", "no name of a namespace"),
        ("sm://p/n\n", "cannot be printed"),
        ("sm://" + "a" * 5000, "more than 4096 characters"),
    ],
)
def test_what_is_wrong_is_said(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)


@given(
    prefix=st.sampled_from(REFERENCE_PREFIXES),
    text=st.text(alphabet="pPn/?#=%0.:destination&éü\x00 ", max_size=60) | st.text(max_size=30),
)
def test_any_text_is_read_or_refused_without_a_word_of_it(prefix: str, text: str) -> None:
    marked = f"{prefix}{text}hunter2"
    try:
        found = parse(marked)
    except ValueError as error:
        assert "hunter2" not in str(error)
    else:
        assert "hunter2" not in str(found), "people see it"
