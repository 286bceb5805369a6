"""The port numbers of the mesh, each once, with who listens there (ARCHITECTURE.md has the table)."""

from __future__ import annotations

ADMIN = 15000
"""Admin of hgate, of Envoy in the container; loopback only."""

ZTUNNEL_OUTBOUND = 15001
"""ztunnel accepts outbound connections here; no tunnel of the HBONE port leads there."""

OUTBOUND = ZTUNNEL_OUTBOUND
"""Envoy under pilot-agent, where the app's outbound connections are captured: they are led here."""

INBOUND_MTLS = 15003
"""Envoy or the built-in end in the container: the mesh's mTLS, carried by the tunnel."""

SERVICES = 15005
"""krun, if it is told to: a proxy to the project's Cloud Run services, on the container's loopback."""

ZTUNNEL_INBOUND = 15006
"""ztunnel accepts inbound plain text here; no tunnel of the HBONE port leads there."""

INBOUND = ZTUNNEL_INBOUND
"""Envoy under pilot-agent, for plain text that comes in; krun captures none."""

HTTP_PROXY = 15007
"""On the container's loopback, Envoy's under pilot-agent or krun's own: an HTTP proxy into the mesh (the
original's port)."""

HBONE = 15008
"""hgate, and ztunnel: HBONE proper, CONNECT over mTLS HTTP/2."""

HBONE_H2C = 15009
"""krun: tunnels as HTTP/2 without TLS, behind Cloud Run's front end. hgate, if it is told to: HBONE in such
tunnels, behind a front end of its own."""

ISTIOD = 15012
"""istiod: the mesh's control plane and its certificate authority, TLS."""

KRUN_ADMIN = 15019
"""krun's admin; loopback only."""

METRICS = 15020
"""Prometheus metrics of hgate, or of krun, its Envoy and the app."""

HEALTH = 15021
"""Readiness of hgate, or of krun."""

CLUSTER_OPS = 15023
"""hgate's process at the API server: metrics and readiness, beside hgate's own in one pod."""

PILOT_AGENT = 15030
"""pilot-agent under krun: its metrics and Envoy's. Elsewhere it has 15020, which is krun's here."""

PILOT_HEALTH = 15031
"""Readiness of Envoy under krun's pilot-agent. Elsewhere it has 15021, which is krun's here."""

SSHD = 15022
"""The container's sshd, target of `/_hbone/22`."""

PILOT_DNS = 15053
"""pilot-agent, where it answers DNS: the app's questions are led here."""

ZTUNNEL_SOCKS = 15080
"""ztunnel's SOCKS5 port; no tunnel of the HBONE port leads there."""

REVERSE = 15441
"""hgate: workloads that cannot be dialled connect here and register their names (the original's port)."""

SNI = 15442
"""hgate: mTLS connections routed by SNI (the original's port)."""

SNI_ISTIO = 15443
"""hgate: the same, on Istio's customary gateway port."""

STS = 15463
"""krun: token exchange for Envoy and others in the container, loopback only (the original's port)."""

APP = 8080
"""The app in the container."""

HTTPS = 443
"""Cloud Run's front end."""
