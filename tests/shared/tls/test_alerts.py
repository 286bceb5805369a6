from __future__ import annotations

import ssl

import pytest

from shared.errors import ALERT_ACCESS_DENIED, ALERT_INTERNAL_ERROR, ALERT_UNRECOGNIZED_NAME
from shared.tls import alerts


def test_bytes_on_the_wire() -> None:
    #                                                     alert, TLS 1.2, 2 bytes, fatal, description
    assert alerts.fatal(ALERT_UNRECOGNIZED_NAME) == bytes.fromhex("15 0303 0002 02 70")
    assert alerts.fatal(ALERT_ACCESS_DENIED) == bytes.fromhex("15 0303 0002 02 31")


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        (ALERT_UNRECOGNIZED_NAME, "UNRECOGNIZED_NAME"),
        (ALERT_ACCESS_DENIED, "ACCESS_DENIED"),
        (ALERT_INTERNAL_ERROR, "INTERNAL_ERROR"),
    ],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_has_sent_its_hello_understands_it(
    version: ssl.TLSVersion, description: int, reason: str
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.minimum_version = context.maximum_version = version
    client = context.wrap_bio(incoming, outgoing, server_hostname="hello.example.com")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    incoming.write(alerts.fatal(description))
    with pytest.raises(ssl.SSLError, match=reason):
        client.do_handshake()


@pytest.mark.parametrize("description", [-1, 256])
def test_a_description_is_one_byte(description: int) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.255"):
        alerts.fatal(description)
