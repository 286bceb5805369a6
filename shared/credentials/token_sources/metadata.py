"""ID tokens from Google's metadata server, of the account that the machine, pod or service runs as."""

from __future__ import annotations

from urllib.parse import quote

from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST, METADATA_TIMEOUT_S
from shared.credentials.tokens.minting import Minted
from shared.errors import DialError, TokenError, UpstreamError
from shared.net.http1 import Response, Target, get
from shared.trust.token_claims import MAX_TOKEN_BYTES, claims_of, expiry_of


class MetadataMinter:
    """A `Minter` of the default account's tokens."""

    def __init__(self, host: str = DEFAULT_METADATA_HOST, *, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        """`host` is a name or address with an optional port, as in GCE_METADATA_HOST; `timeout_s` bounds one
        request in seconds. Raises ValueError when `host` is malformed."""
        # https://cloud.google.com/compute/docs/instances/verifying-instance-identity
        self._url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/identity"
        target = Target.parse(self._url)
        if target.authority != host:
            raise ValueError(f"metadata host {host!r} is not HOST or HOST:PORT")
        self._timeout_s = timeout_s
        self.identity = f"metadata server at {target}"

    async def mint(self, audience: str) -> Minted:
        """A token for `audience`, which may be one from the server's own cache. Raises TokenError."""
        url = f"{self._url}?audience={quote(audience, safe='')}&format=full"
        response = await asked(url, self.identity, self._timeout_s, MAX_TOKEN_BYTES)
        token = response.body.strip().decode("latin-1")
        try:
            return Minted(token, expiry_of(claims_of(token)))
        except ValueError as error:
            raise TokenError(
                f"no token from the {self.identity}: its answer is {error}", "garbled"
            ) from error


async def asked(url: str, identity: str, timeout_s: float, max_bytes: int) -> Response:
    """What the server, which errors call `identity`, answers. Raises TokenError, without anything of it."""
    try:
        response = await get(
            url, headers={"metadata-flavor": "Google"}, timeout_s=timeout_s, max_bytes=max_bytes
        )
    except DialError as error:
        hint = "set GCE_METADATA_HOST or use a token file"
        raise TokenError(f"no metadata server: {error}; {hint}", "unreachable") from error
    except UpstreamError as error:
        raise TokenError(f"no token from the {identity}: {error}", "unreachable") from error
    if response.status != 200:
        hint = "; has this machine or pod a service account?" if response.status in (403, 404) else ""
        raise TokenError(f"no token from the {identity}: it answered {response.status}{hint}", "refused")
    return response
