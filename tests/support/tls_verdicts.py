"""What our TLS contexts make of certificate chains, under the Python that runs this file.

It imports no package but ours, so it runs under any Python of the machine: `python tls_verdicts.py FOLDER`,
with the checkout on the path, prints the verdicts on the chains in the sub-folders as JSON.
"""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from shared.errors import UnavailableError
from shared.net.tls import contexts

ACCEPTED = "accepted"


def verdicts(folder: Path) -> dict[str, dict[str, str]]:
    """By chain, what a client says who asks for a host name (`outer`), and one of the mesh (`mesh`)."""
    return {
        chain.name: {"outer": _verdict(chain, _outer), "mesh": _verdict(chain, _mesh)}
        for chain in sorted(folder.iterdir())
    }


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """The client's end after a handshake in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0]


def _verdict(chain: Path, client: Callable[[Path], ssl.SSLContext]) -> str:
    server = contexts.server_context(chain / "shown.pem", chain / "key.pem")
    try:
        end = handshake(client(chain / "trusted.pem"), server, (chain / "name").read_text())
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except UnavailableError as error:
        return str(error)
    assert contexts.proved_chain(end), "there is a chain to judge"
    return ACCEPTED


def _outer(trusted: Path) -> ssl.SSLContext:
    return contexts.client_context(trusted, 0.0)


def _mesh(trusted: Path) -> ssl.SSLContext:
    context = contexts.mesh_context(ssl.SSLContext, server=False)
    contexts.trust(context, contexts.read_file(trusted))
    return context


if __name__ == "__main__":
    print(json.dumps(verdicts(Path(sys.argv[1]))))
