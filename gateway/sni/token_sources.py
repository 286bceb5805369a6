"""The gateway's token sources: which one a token rule means, and how many token files are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gateway.rules.routes import Token
from shared.credentials.tokens.minting import Minter
from shared.credentials.tokens.token_cache import TokenCache
from shared.credentials.tokens.tokens import FileToken, NoToken, TokenSource
from shared.errors import TokenError
from shared.ops.token_counts import TokenCounts, TokenStatus

MAX_TOKEN_FILES = 1000
"""Files whose content is kept, as many as there may be routes. An audience that is checked may be one of
many, so there is a bound; beyond it the oldest is forgotten, which costs reading it again."""

MAX_ACCOUNTS = 1000
"""Service accounts that routes name, as many as there may be routes. Beyond it the oldest is forgotten: it
may be one that a reload has removed."""

_NO_TOKEN = NoToken()


class TokenSources:
    """The sources for all token rules. All calls are made on the event loop's thread."""

    def __init__(
        self,
        minter: Minter,
        counts: Callable[[str, str, bool], TokenCounts] | None = None,
        *,
        of_account: Callable[[str], Minter] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`minter` mints the tokens of rules with an audience, `of_account` makes the minter for those that
        name a service account, too; `counts` gives the counts of an identity and audience, and is told
        whether that is new to us; `now` is the wall clock in seconds since 1970."""
        self.cache = TokenCache(counts, now=now)
        self._minter = minter
        self._counts = counts
        self._now = now
        self._files: dict[Token, FileToken] = {}
        self._of_account = of_account
        self._accounts: dict[str, Minter] = {}

    def of(self, rule: Token) -> TokenSource:
        """The source for `rule`."""
        if rule.kind == "audience":
            account = rule.service_account
            minter = self._account(account) if account else self._minter
            return self.cache.source(minter, rule.value, is_fixed=not rule.is_of_client)
        if rule.kind == "file":
            return self._files.get(rule) or self._file(rule)
        return _NO_TOKEN

    def statuses(self) -> Iterator[TokenStatus]:
        """What operators may know of each token."""
        yield from self.cache.statuses()
        for file in self._files.values():
            yield file.status()

    def close(self) -> None:
        """Lets go of all of them."""
        self.cache.close()

    def _account(self, account: str) -> Minter:
        minter = self._accounts.get(account)
        if minter is None:
            if self._of_account is None:
                raise TokenError(f"no tokens of {account}: nobody is there to impersonate it")
            if len(self._accounts) >= MAX_ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
            minter = self._accounts[account] = self._of_account(account)
        return minter

    def _file(self, rule: Token) -> FileToken:
        if len(self._files) >= MAX_TOKEN_FILES:
            del self._files[next(iter(self._files))]
        counts = self._counts(f"file {rule.value}", rule.audience, False) if self._counts else None
        file = self._files[rule] = FileToken(rule.value, rule.audience, counts=counts, now=self._now)
        return file
