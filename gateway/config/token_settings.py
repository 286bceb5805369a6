"""What `tokens:` in the gateway's file can set: where ID tokens come from.

Owned here: the fields' names and how each is written in YAML. What they mean, what each may be, and the
environment, which goes over the file, are `shared/credentials/token_sources/token_settings.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gateway.config.named_files import later_file
from gateway.config.yaml_nodes import Value
from shared.config.kinds import Choice
from shared.credentials.token_sources import token_settings
from shared.credentials.token_sources.token_settings import TokenSettings

T = TypeVar("T")

SOURCE = Choice(token_settings.SOURCES)

LEAST_TIMEOUT_S = 0.1
"""Less would fail always; a name lookup alone may take that long."""

TEXTS: dict[str, Callable[[str], str]] = {
    "service_account": token_settings.service_account,
    "metadata_host": token_settings.metadata_host,
    "sts_audience": token_settings.sts_audience,
    "project_id": token_settings.name_of_google,
    "project_number": token_settings.project_number,
    "cluster_name": token_settings.name_of_google,
    "cluster_location": token_settings.name_of_google,
    "sts_url": token_settings.endpoint,
    "iam_url": token_settings.endpoint,
    "oauth_url": token_settings.endpoint,
}
FILES = ("credentials", "subject_token")
TIMEOUTS = ("metadata_timeout", "step_timeout")
FIELDS = ("source", *FILES, *TIMEOUTS, *TEXTS)


def read(value: Value, folder: Path) -> TokenSettings:
    """The settings of the mapping `value`; paths in it start from `folder`. Raises ConfigError."""
    given = value.mapping(FIELDS)
    default = TokenSettings()

    def file(name: str) -> Path | None:
        return given.read(name, lambda value: later_file(value, folder), None)

    def seconds(name: str, default_s: float) -> float:
        return given.read(
            name, lambda value: value.duration(LEAST_TIMEOUT_S, token_settings.MAX_STEP_S), default_s
        )

    texts: dict[str, Any] = {
        name: given.read(name, partial(_parsed, parse=parse), "")
        for name, parse in TEXTS.items()
        if given.get(name)
    }
    return TokenSettings(
        source=given.read(
            "source", partial(_parsed, parse=Choice(token_settings.SOURCES).parse), default.source
        ),
        credentials=file("credentials"),
        subject_token=file("subject_token"),
        metadata_timeout_s=seconds("metadata_timeout", default.metadata_timeout_s),
        step_timeout_s=seconds("step_timeout", default.step_timeout_s),
        **texts,
    )


def _parsed(value: Value, parse: Callable[[str], T]) -> T:
    """A word, for a project's number is one to YAML."""
    word = value.word()
    try:
        return parse(word)
    except ValueError as error:
        raise value.error(str(error)) from error
