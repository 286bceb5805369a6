"""Access tokens from the metadata server, and what it may answer instead."""

from __future__ import annotations

import pytest

from shared.credentials.token_sources.metadata_access import MetadataAccess
from shared.errors import TokenError
from tests.support.google import Google
from tests.support.metadata_server import Answer, closed_port


async def test_a_token_is_kept(google: Google) -> None:
    access = MetadataAccess(google.metadata_host)
    minted = await access.access_token()
    assert (await access.access_token()) is minted
    assert minted.token in google.secrets
    assert [request.headers["metadata-flavor"] for request in google.requests] == ["Google"]


@pytest.mark.parametrize(
    ("answer", "says", "reason"),
    [
        (Answer(b"no such account", 404), "it answered 404", "refused"),
        (Answer(b"<html>SECRET</html>"), "its answer is no JSON object", "garbled"),
        (Answer(b'{"access_token": "a", "expires_in": true}'), "its expires_in is no number", "garbled"),
        (Answer(b'{"access_token": "a", "expires_in": 0}'), "it has expired already", "expired"),
        (Answer(raw=b"SECRET"), "broken answer", "unreachable"),
    ],
)
async def test_an_answer_that_is_none(google: Google, answer: Answer, says: str, reason: str) -> None:
    google.faults["metadata"] = answer
    with pytest.raises(TokenError) as caught:
        await MetadataAccess(google.metadata_host).access_token()
    assert says in str(caught.value)
    assert google.metadata_host in str(caught.value)
    assert caught.value.reason == reason
    assert "SECRET" not in str(caught.value)


async def test_nobody_there() -> None:
    with pytest.raises(TokenError, match=r"cannot connect to 127\.0\.0\.1"):
        await MetadataAccess(f"127.0.0.1:{closed_port()}").access_token()


async def test_no_answer(google: Google) -> None:
    google.closed.add("metadata")
    with pytest.raises(TokenError, match=r"within 0\.05 s"):
        await MetadataAccess(google.metadata_host, timeout_s=0.05).access_token()
