"""All that a log could show of an error: for tests that look for a secret in it."""

from __future__ import annotations

import traceback

from shared.errors import HboneError


def all_texts(error: BaseException | None) -> str:
    """The texts of an error and of everything it was raised from."""
    texts = []
    while error is not None:
        texts.append(f"{error!r} {error}")
        assert isinstance(error, HboneError | OSError | ValueError | TimeoutError)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


def told(error: BaseException) -> str:
    """Its text, its causes, the traceback."""
    return "".join(traceback.format_exception(error))
