"""`hbone token`: which token would be sent, of whom it is and until when; itself only when that is asked for.

What is told goes to standard output. With --show the token alone goes there, so that a shell can take it, and
what is told to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from hbone import token_choice
from shared import loop
from shared.errors import EXIT_OK, UnavailableError, UsageError
from shared.trust.token_claims import at_utc, claims_of, expiry_of, shown_claim

_MINUTE_S = 60
_HOUR_S = 3600


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what is known of the token; returns the exit code.

    Raises:
        UsageError: a flag or a variable of `environ` is wrong.
        TokenError: there is no token.
    """
    audience: str | None = options.audience
    if audience is None and options.token_file is None:
        raise UsageError("--audience is missing: a token is always for somebody, such as https://HOST")
    if audience is not None:
        token_choice.checked_audience(audience)
    if options.token_file is not None and options.source is not None:
        raise UsageError("--source has no meaning beside --token-file")
    if options.token_file is not None:
        token = loop.run(token_choice.of_file(options.token_file, audience or "").token())
        whose = f"file {options.token_file}"
    else:
        if options.source is not None:
            environ = {**environ, "HBONE_TOKENS": options.source}
        minted = token_choice.MintedToken(token_choice.minter(environ), audience or "")
        token = loop.run(minted.token())
        whose = minted.identity
    told = "".join(f"{name:<10} {text}\n" for name, text in [("source", whose), *_about(token, time.time())])
    if options.show:
        _write(sys.stderr, told)
        _write(sys.stdout, f"{token}\n")
    else:
        _write(sys.stdout, told)
    return EXIT_OK


def _about(token: str, now: float) -> list[tuple[str, str]]:
    """What `token` says about itself."""
    try:
        claims = claims_of(token)
    except ValueError:
        return [("token", f"opaque, {len(token)} characters: it says nothing about itself")]
    rows = [
        (name, shown_claim(claims[claim]))
        for claim, name in (("aud", "audience"), ("sub", "subject"), ("email", "email"))
        if claim in claims
    ]
    try:
        expires_at_s = expiry_of(claims)
        rows.append(("expires", f"{at_utc(expires_at_s)}, in {_lasting(expires_at_s - now)}"))
    except ValueError as error:
        rows.append(("expires", f"not known: {error}"))
    return rows


def _lasting(seconds: float) -> str:
    """A duration as people say it."""
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"


def _write(stream: TextIO | None, text: str) -> None:
    """Raises UnavailableError if nobody takes it."""
    if stream is None:  # closed when we started
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        raise UnavailableError(f"cannot write the answer: {error.strerror}") from error
