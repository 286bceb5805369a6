"""Files that the gateway's file names: where they are, and whether they hold what they should.

Owned here: the look at a file while the settings are read. What is in it is used by others, later.
"""

from __future__ import annotations

from pathlib import Path

from gateway.yaml_nodes import Value
from shared.errors import UnavailableError
from shared.net.tls import check_file


def ca_file(value: Value, folder: Path) -> Path:
    """The path of a file with the certificates to trust, which starts from `folder`. Raises ConfigError if it
    cannot be read or holds none."""
    path = folder / value.text()
    try:
        check_file(path)
    except UnavailableError as error:
        raise value.error(str(error)) from error
    return path
