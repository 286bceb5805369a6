"""Which peers Envoy lets in, in its own words: matchers of the certificate's URI names.

Allowed names are regular expressions. These matchers can only be joined by "or", and RE2 cannot say "but
not", so a policy that denies is a piece of Lua, which Envoy runs once a handshake
(`envoy.string_matcher.lua`). Envoy's RBAC filter, which could say "but not" too, decides when the first
byte has come: by then the app has been connected, and an app that speaks first has spoken. Where Envoy serves
HTTP no app speaks first, and that filter decides (`envoy_http`).
"""

from __future__ import annotations

from pathlib import Path

from agent.mtls.envoy_json import TYPES, Json
from shared.errors import ConfigError, UnavailableError
from shared.net.tls import certificate_folder, root_files
from shared.trust.peer_patterns import PeerPatterns
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import MAX_URI_BYTES, SCHEME

_TYPE = f"{TYPES}.string_matcher.lua.v3.Lua"

# Segment by segment: the same meaning as the regular expressions, in time that grows with the name only. A
# pattern is {domains, segments, whether a rest may follow}; a segment is the texts between its stars.
_SOURCE = """
local allow = %(allow)s
local deny = %(deny)s

local function segment_matches(text, pieces)
  local first, last = pieces[1], pieces[#pieces]
  if #pieces == 1 then return text == first end
  if #text < #first + #last or text:sub(1, #first) ~= first then return false end
  local at, stop = #first + 1, #text - #last
  if text:sub(stop + 1) ~= last then return false end
  for i = 2, #pieces - 1 do
    local from, to = text:find(pieces[i], at, true)
    if from == nil or to > stop then return false end
    at = to + 1
  end
  return true
end

local function matches(domain, segments, pattern)
  if not pattern[1][domain] then return false end
  local wanted = pattern[2]
  if #segments < #wanted or (#segments > #wanted) ~= pattern[3] then return false end
  for i = 1, #wanted do
    if not segment_matches(segments[i], wanted[i]) then return false end
  end
  return true
end

local function any_matches(domain, segments, patterns)
  for _, pattern in ipairs(patterns) do
    if matches(domain, segments, pattern) then return true end
  end
  return false
end

function envoy_match(name)
  if #name > %(longest)d then return false end
  local domain, path = name:match("^%(scheme)s([^/]+)(.*)$")
  if domain == nil then return false end
  local segments = {}
  while path ~= "" do
    local segment, rest = path:match("^/([%%w._-]+)(.*)$")
    if segment == nil then return false end
    segments[#segments + 1] = segment
    path = rest
  end
  return any_matches(domain, segments, allow) and not any_matches(domain, segments, deny)
end
"""


def name_matchers(policy: PeerPolicy) -> list[Json]:
    """For `match_typed_subject_alt_names`, one of which has to match. Raises ValueError for an empty allow
    list, which Envoy would take for "everybody"."""
    if not policy.allow:
        raise ValueError("an empty allow list would let every peer in that the roots vouch for")
    if not policy.deny:
        return [_uri({"safe_regex": {"regex": regex}}) for regex in policy.allow.regexes()]
    lua = {"@type": _TYPE, "source_code": {"inline_string": source(policy)}}
    return [_uri({"custom": {"name": "envoy.string_matcher.lua", "typed_config": lua}})]


def domains_of_roots(certificates: Path) -> list[str]:
    """The trust domains whose roots stand in the folder `certificates`, as far as that is told. Envoy would
    let each of them vouch for any name, unlike the built-in end."""
    paths = certificate_folder.find(certificates)
    try:
        bundles = root_files.trust_bundles(paths.bundles)
        found = [bundles.domains_of(root) for root in root_files.read_file(paths.roots)]
    except (ConfigError, UnavailableError):
        return []  # Envoy does not read the one, and says itself what is wrong with the other
    return sorted(frozenset().union(*found))


def source(policy: PeerPolicy) -> str:
    """The Lua code that decides as `policy` does."""
    return _SOURCE % {
        "allow": _table(policy.allow),
        "deny": _table(policy.deny),
        "longest": MAX_URI_BYTES,
        "scheme": SCHEME,
    }


def _uri(matcher: Json) -> Json:
    return {"san_type": "URI", "matcher": matcher}


def _table(patterns: PeerPatterns) -> str:
    # What is quoted here has letters, digits, dots, hyphens and underscores only.
    rows = []
    for domains, segments, any_rest in patterns.parts():
        names = ", ".join(f'["{domain}"] = true' for domain in domains)
        globs = ", ".join(_pieces(segment) for segment in segments)
        rows.append(f"{{{{{names}}}, {{{globs}}}, {str(any_rest).lower()}}}")
    return f"{{{', '.join(rows)}}}"


def _pieces(segment: str) -> str:
    return "{" + ", ".join(f'"{piece}"' for piece in segment.split("*")) + "}"
