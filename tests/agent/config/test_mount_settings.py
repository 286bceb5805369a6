"""What is to be mounted, as the settings say it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.mount_settings import EnvFrom, Mount, ObjectName, is_reference
from agent.config.settings import from_env
from shared.errors import UsageError

DB, APP = ObjectName("secret", "db-credentials"), ObjectName("configmap", "app.config")


def test_by_default_nothing_is_asked_for() -> None:
    settings = from_env({}).mounts
    assert not settings.asks_cluster and not settings.has_references({"A": "sm", "B": "http://sm://"})


def test_objects_in_folders() -> None:
    text = "secret/db-credentials:/etc/db, cm/app.config:/etc/app/:optional"
    settings = from_env({"HBONE_MOUNTS": text}).mounts
    assert settings.mounts == (Mount(DB, Path("/etc/db"), False), Mount(APP, Path("/etc/app"), True))
    assert settings.asks_cluster
    assert (str(DB), DB.resource, APP.resource) == ("secret/db-credentials", "secrets", "configmaps")


def test_objects_in_variables() -> None:
    text = "secrets/db-credentials,APP_=configmap/app.config:optional"
    settings = from_env({"HBONE_ENV_FROM": text}).mounts
    assert settings.env_from == (EnvFrom(DB, "", False), EnvFrom(APP, "APP_", True))


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("HBONE_MOUNTS", "db:/etc/db", "neither secret/NAME nor configmap/NAME"),
        ("HBONE_MOUNTS", "pod/db:/etc/db", "neither secret/NAME nor configmap/NAME"),
        ("HBONE_MOUNTS", "secret/db", "is no KIND/NAME:/FOLDER"),
        ("HBONE_MOUNTS", "secret/db:etc", "is no KIND/NAME:/FOLDER"),
        ("HBONE_MOUNTS", "secret/db:/", "is no KIND/NAME:/FOLDER"),
        ("HBONE_MOUNTS", "secret/db://", "is no KIND/NAME:/FOLDER"),
        ("HBONE_MOUNTS", "secret/db:/a/../b", "is no KIND/NAME:/FOLDER"),
        ("HBONE_MOUNTS", "secret/Db:/etc/db", "lower-case letters"),
        ("HBONE_MOUNTS", "secret/../db:/etc/db", "lower-case letters"),
        ("HBONE_MOUNTS", "secret/db:/etc/db:maybe", "'maybe' is not optional"),
        ("HBONE_MOUNTS", "secret/a:/etc/db,secret/b:/etc/db/", "one folder for two objects"),
        ("HBONE_MOUNTS", ",".join(f"secret/a:/{n}" for n in range(33)), "33 are more than 32"),
        ("HBONE_ENV_FROM", "A-B=secret/db", "a prefix has letters"),
        ("HBONE_ENV_FROM", "secret", "neither secret/NAME nor configmap/NAME"),
        ("HBONE_MOUNT_REFRESH", "0", "between 0.1s and 86400s"),
        ("HBONE_KMS_URL", "http://kms.example", "has to be https"),
    ],
)
def test_what_is_wrong_is_said(variable: str, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"^invalid {variable}.*{reason}"):
        from_env({variable: text})


@given(text=st.text(alphabet="secrtconfigmap/:,=_-.aB9 é\n", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for variable in ("HBONE_MOUNTS", "HBONE_ENV_FROM"):
        try:
            settings = from_env({variable: text}).mounts
        except UsageError:
            continue
        for mount in settings.mounts:
            assert mount.folder.is_absolute() and len(mount.folder.parts) > 1


def test_krun_s_own_settings_are_no_references() -> None:
    with pytest.raises(UsageError) as caught:
        from_env({"CAROOT_ISTIOD": "sm://proj/roots"})
    assert (
        str(caught.value)
        == "invalid CAROOT_ISTIOD (only the app's variables may be references, not krun's own)"
    )


def test_references_may_be_left_to_the_app() -> None:
    environ = {"A": "sm://p/n"}
    assert is_reference(environ["A"])
    assert from_env(environ).mounts.has_references(environ)
    assert not from_env({"HBONE_REFERENCES": "0", **environ}).mounts.has_references(environ)
