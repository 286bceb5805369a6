"""HPACK's static table (RFC 7541 appendix A): the fields that both ends know before anything is said."""

from __future__ import annotations

_LINES = """
:authority
:method GET
:method POST
:path /
:path /index.html
:scheme http
:scheme https
:status 200
:status 204
:status 206
:status 304
:status 400
:status 404
:status 500
accept-charset
accept-encoding gzip, deflate
accept-language
accept-ranges
accept
access-control-allow-origin
age
allow
authorization
cache-control
content-disposition
content-encoding
content-language
content-length
content-location
content-range
content-type
cookie
date
etag
expect
expires
from
host
if-match
if-modified-since
if-none-match
if-range
if-unmodified-since
last-modified
link
location
max-forwards
proxy-authenticate
proxy-authorization
range
referer
refresh
retry-after
server
set-cookie
strict-transport-security
transfer-encoding
user-agent
vary
via
www-authenticate
"""

FIELDS: tuple[tuple[bytes, bytes], ...] = tuple(
    (name, value) for name, _, value in (line.encode().partition(b" ") for line in _LINES.split("\n")[1:-1])
)
"""The fields; the first has index 1."""

INDEX_OF_FIELD = {field: index for index, field in enumerate(FIELDS, 1)}

INDEX_OF_NAME = {name: index for index, (name, _) in reversed(list(enumerate(FIELDS, 1)))}
"""The lowest index with a name, which may have several."""

ENTRY_OVERHEAD_BYTES = 32
"""What a field counts beyond its text, in a table (RFC 7541 section 4.1) and in a header list (RFC 9113
section 6.5.2)."""
