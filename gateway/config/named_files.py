"""Files that hgate's file names: where they are, and whether they are as they should be when it is read."""

from __future__ import annotations

from pathlib import Path

from gateway.config.yaml_nodes import Value
from shared import regular_files
from shared.config.kinds import file_path
from shared.errors import UnavailableError
from shared.net.tls.contexts import check_file


def check_ca_file(value: Value, path: Path) -> None:
    """Raises ConfigError if the file that `value` names cannot be read, or has no certificates to trust."""
    try:
        check_file(path)
    except UnavailableError as error:
        raise value.error(str(error)) from error


def later_file(value: Value, folder: Path) -> Path:
    """The path of a file, from `folder` on, that may be written later; warns if it is not there yet. Raises
    ConfigError for what looks like the content of such a file."""
    path = folder / value.parsed(file_path)
    note_missing(value, path)
    return path


def note_missing(value: Value, path: Path) -> None:
    """Warns if the file that `value` names cannot be read now."""
    try:
        with regular_files.opened(path):
            pass
    except OSError as error:
        value.warn(f"{path} cannot be read: {error.strerror or error}; it has to be there when it is needed")
