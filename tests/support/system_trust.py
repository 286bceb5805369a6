"""Other certificates in place of the system's trusted ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.net.tls import contexts


@contextmanager
def system_trusts(file: Path) -> Iterator[None]:
    """Within the block the system trusts the certificates in `file`; contexts that were made before, and are
    kept for connections to come, are forgotten."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("SSL_CERT_FILE", str(file))
        contexts._followed.cache_clear()
        try:
            yield
        finally:
            contexts._followed.cache_clear()
