"""`hbone token`: whose token a tunnel would send, its audience and when it expires.

The description is printed to standard output. With --show only the token is, for use in a shell, and the
description is printed to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from hbone import token_choice
from hbone.output import write
from shared import loop
from shared.errors import EXIT_OK, UsageError
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
        raise UsageError("--audience is missing: the service that the token is for, such as https://HOST")
    if audience is not None:
        token_choice.check_audience(audience)
    if options.token_file is not None and options.source is not None:
        raise UsageError("--source is not allowed with --token-file")
    if options.token_file is not None:
        token = loop.run(token_choice.file_token(options.token_file, audience or "").token())
        whose = f"file {options.token_file}"
    else:
        if options.source is not None:
            environ = {**environ, "HBONE_TOKENS": options.source}
        host = urlsplit(audience or "").hostname or ""
        minted = token_choice.MintedToken(lambda: token_choice.minter(environ), audience or "", host)
        token = loop.run(minted.token())
        whose = minted.identity
    description = "".join(
        f"{name:<10} {text}\n" for name, text in [("source", whose), *_about(token, time.time())]
    )
    if options.show:
        write(sys.stderr, description)
        write(sys.stdout, f"{token}\n")
    else:
        write(sys.stdout, description)
    return EXIT_OK


def _about(token: str, now: float) -> list[tuple[str, str]]:
    """The rows of the description: a name and a text."""
    try:
        claims = claims_of(token)
    except ValueError:
        return [("token", f"opaque, {len(token)} characters: its claims cannot be read")]
    rows = [
        (name, shown_claim(claims[claim]))
        for claim, name in (("aud", "audience"), ("sub", "subject"), ("email", "email"))
        if claim in claims
    ]
    try:
        expires_at_s = expiry_of(claims)
        rows.append(("expires", f"{at_utc(expires_at_s)}, in {_lasting(expires_at_s - now)}"))
    except ValueError as error:
        rows.append(("expires", f"unknown: {error}"))
    return rows


def _lasting(seconds: float) -> str:
    """A duration as text."""
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
