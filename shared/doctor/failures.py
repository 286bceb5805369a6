"""The catalogue of failures: for each the hop where it shows, its cause, and what to do, a sentence each.

What was observed in the case at hand is no part of it; that is the detail beside it (`Failed`).
"""

from __future__ import annotations

from enum import Enum, unique

from shared.doctor.hops import Hop


@unique
class Failure(Enum):
    """Its name is what `--json` says and tests look for; it is never changed."""

    hop: Hop
    cause: str
    action: str

    def __new__(cls, hop: Hop, cause: str, action: str) -> Failure:
        failure = object.__new__(cls)
        failure._value_ = (hop, cause, action)
        failure.hop = hop
        failure.cause = cause
        failure.action = action
        return failure

    # This machine.

    NO_PROGRAM = (
        Hop.MACHINE,
        "A program that is needed is not on PATH.",
        "Install it, or add its folder to PATH.",
    )
    NO_DESTINATION = (
        Hop.DESTINATION,
        "The argument leads nowhere.",
        "Correct it as the message says: a URL, HOST:PORT, or a name that the cluster or Cloud Run knows.",
    )
    NO_TOKEN = (
        Hop.CREDENTIALS,
        "There is nobody to ask for a token, or nobody answers.",
        "Set HBONE_TOKENS or GOOGLE_APPLICATION_CREDENTIALS, or use --token-file with a token of gcloud.",
    )
    TOKEN_DENIED = (
        Hop.CREDENTIALS,
        "The token service refuses this account a token.",
        "Grant the account roles/iam.serviceAccountTokenCreator on the one that it impersonates, or use "
        "another one.",
    )
    TOKEN_FILE = (
        Hop.CREDENTIALS,
        "The token's file cannot be used.",
        "Write a token into it, alone: gcloud auth print-identity-token >FILE.",
    )
    OWN_CERTIFICATE = (
        Hop.CREDENTIALS,
        "Our own certificate, its key or the trusted certificates cannot be used.",
        "Check the files with hbone certs FOLDER.",
    )

    # The way there.

    NO_NAME = (
        Hop.DNS,
        "The name servers know no such host.",
        "Check the spelling; if the name is private, connect to the VPN or VPC whose name servers know it.",
    )
    NO_ADDRESS = (
        Hop.DNS,
        "The host's name is there, and has no address.",
        "Add an A or AAAA record, or use --connect HOST:PORT.",
    )
    DNS_SILENT = (
        Hop.DNS,
        "No name server answers.",
        "Check the name servers in /etc/resolv.conf, and that UDP and TCP to their port 53 is allowed.",
    )
    DNS_FAILED = (
        Hop.DNS,
        "The name server answers with a failure.",
        "Ask it with dig HOST, or use another name server.",
    )
    PROXY_DOWN = (
        Hop.PROXY,
        "The HTTP proxy cannot be reached, or speaks no HTTP.",
        "Check HTTPS_PROXY; to do without it, add the host to NO_PROXY.",
    )
    PROXY_REFUSED = (
        Hop.PROXY,
        "The HTTP proxy does not let us through to this host.",
        "Have it allow CONNECT to the host, give it a user in HTTPS_PROXY, or add the host to NO_PROXY.",
    )
    TCP_REFUSED = (
        Hop.TCP,
        "Nothing listens at this address and port.",
        "Check the port, and that the service is up.",
    )
    TCP_SILENT = (
        Hop.TCP,
        "Packets to this address are dropped on the way.",
        "Allow outbound TCP to this port in the firewall or NetworkPolicy; a private address needs its VPN.",
    )
    TCP_UNREACHABLE = (
        Hop.TCP,
        "This machine has no way to the address.",
        "Check the network connection and its routes; if IPv6 is at fault, --connect takes an IPv4 address.",
    )
    CA_FILE = (
        Hop.TLS,
        "The file of trusted certificates cannot be used.",
        "Name a file with CA certificates in PEM.",
    )
    NOT_TLS = (
        Hop.TLS,
        "The server does not speak TLS on this port.",
        "Check the port; for a local port without TLS write http://.",
    )
    TLS_VERSION = (
        Hop.TLS,
        "The server speaks only versions of TLS that are not safe.",
        "Have the server speak TLS 1.2 or 1.3; a proxy that ends TLS on the way may be the server here.",
    )
    TLS_SILENT = (
        Hop.TLS,
        "The server accepts the connection and says nothing in TLS.",
        "Check that the port is the right one, and that no firewall looks into TLS.",
    )
    TLS_CLOSED = (
        Hop.TLS,
        "The server, or a firewall that reads server names, ends the connection in the handshake.",
        "Check that the host may be reached from this network, and that the server has a certificate.",
    )
    TLS_ALERT = (
        Hop.TLS,
        "The server breaks the TLS handshake off.",
        "The alert's name says why; the server's log says more.",
    )
    CERTIFICATE_EXPIRED = (
        Hop.TLS,
        "The server's certificate has expired, or this machine's clock is ahead.",
        "Have the certificate renewed; compare date with another clock.",
    )
    CERTIFICATE_TOO_NEW = (
        Hop.TLS,
        "The server's certificate is not valid yet, or this machine's clock is behind.",
        "Set the clock; else wait until the certificate is valid.",
    )
    CERTIFICATE_NAME = (
        Hop.TLS,
        "The server's certificate is for other names.",
        "Check the URL's host; with --connect the address leads to another server.",
    )
    CERTIFICATE_UNTRUSTED = (
        Hop.TLS,
        "The server's certificate is from an authority that is not trusted here.",
        "Name its CA with --ca, or install ca-certificates; a proxy that reads TLS has a CA of its own.",
    )
    CERTIFICATE_BAD = (
        Hop.TLS,
        "The server's certificate cannot be accepted.",
        "Have it issued again; the detail is OpenSSL's.",
    )
    NO_HTTP2 = (
        Hop.ALPN,
        "The server does not speak HTTP/2.",
        "Check that the address is the service's; a proxy that ends TLS on the way has to offer ALPN h2.",
    )

    # The service.

    TOKEN_EXPIRED = (
        Hop.TOKEN,
        "The token has expired, or this machine's clock is ahead.",
        "Get a new token; compare date with another clock.",
    )
    TOKEN_AUDIENCE = (
        Hop.TOKEN,
        "The token is for another audience than this service.",
        "Get a token for https://HOST of the service, or name the service's custom audience with --audience.",
    )
    TOKEN_REFUSED = (
        Hop.TOKEN,
        "The service does not believe the token (401).",
        "Get a token from Google for this service; hbone token shows whose it is.",
    )
    TOKEN_WANTED = (
        Hop.TOKEN,
        "The service wants a token, and none was sent.",
        "Leave --no-token out, or name a file with --token-file.",
    )
    CLOCK_WRONG = (
        Hop.TOKEN,
        "The service does not believe the token (401), and the clocks here and there differ.",
        "Set this machine's clock, by NTP for example.",
    )
    NO_SERVICE = (
        Hop.INGRESS,
        "Google's front end knows no service of this name (404).",
        "Check service, project number, region and traffic tag in the URL: gcloud run services list.",
    )
    INGRESS = (
        Hop.INGRESS,
        "The service's ingress setting keeps this network out, or there is no such service (404).",
        "Come from the service's VPC, or set the ingress to all: gcloud run services update SERVICE "
        "--ingress all.",
    )
    NOT_INVOKER = (
        Hop.FRONT_END,
        "The token's account may not call the service (403).",
        "Grant the account roles/run.invoker on the service; a new grant takes a minute.",
    )
    IAP = (
        Hop.FRONT_END,
        "Identity-Aware Proxy wants a person to log in.",
        "Use the service's own run.app URL, or a token whose audience is the client ID of IAP.",
    )
    REDIRECTED = (
        Hop.FRONT_END,
        "The answer sends us to another URL.",
        "Use that URL, or one that leads to krun directly.",
    )
    NO_INSTANCE = (
        Hop.FRONT_END,
        "No instance of the service is free (429).",
        "Raise the service's maximum of instances or its concurrency, or wait.",
    )
    SERVICE_ERROR = (
        Hop.FRONT_END,
        "The front end failed (500).",
        "Try again; look for the request in the service's log.",
    )
    CONTAINER_DOWN = (
        Hop.FRONT_END,
        "The front end has no container that answers (502 or 503).",
        "Look at the service's log: does the container start, and listen on its PORT on all interfaces?",
    )
    CONTAINER_SLOW = (
        Hop.FRONT_END,
        "The container did not answer within the service's request timeout (504).",
        "Look at the service's log; is the container still starting?",
    )
    NO_ANSWER = (
        Hop.FRONT_END,
        "The service accepts the request and does not answer.",
        "Try again with a longer --timeout; an instance may be starting.",
    )
    ANSWER_BROKE = (
        Hop.FRONT_END,
        "The service breaks the request off without an answer.",
        "Look at the service's log; does the container crash?",
    )
    OTHER_STATUS = (
        Hop.FRONT_END,
        "The service answers with a status that krun does not use.",
        "The detail quotes the answer; look at what serves this URL.",
    )

    # The container.

    HTTP1_TO_KRUN = (
        Hop.HTTP2,
        "The front end speaks HTTP/1.1 to the container, which carries no tunnel.",
        "Deploy with --use-http2, or name the container's port h2c; ambient networking has no HTTP/2 to the "
        "container and has to be off.",
    )
    HTTP2_TO_HTTP1 = (
        Hop.HTTP2,
        "The front end speaks HTTP/2 to the container, and what listens there does not.",
        "Have krun listen on the container's port: HBONE_LISTEN=0.0.0.0:PORT.",
    )
    HALF_DUPLEX = (
        Hop.HTTP2,
        "Something on the way passes no answer on before the request has ended.",
        "Use HTTP/2 on each hop to the container; a proxy on the way must not buffer requests.",
    )
    NOT_KRUN = (
        Hop.KRUN,
        "It is not krun that answers.",
        "Start the container by krun, and have it listen on the port that Cloud Run sends requests to.",
    )
    NO_PROBES = (
        Hop.KRUN,
        "This krun is no far end for probes.",
        "Deploy it with HBONE_PROBES=1 for the time of the measurement.",
    )
    NO_TARGET = (
        Hop.DIAL,
        "krun knows no such target.",
        "Use one of the targets that the detail names, or set PORT_NAME=HOST:PORT for krun.",
    )
    KRUN_TOO_OLD = (
        Hop.DIAL,
        "This krun is too old for inner HBONE, which the route asks for.",
        "Deploy the service with a newer krun, one that has target 15008.",
    )
    TARGET_REFUSED = (
        Hop.DIAL,
        "Nothing listens at the target's address in the container.",
        "Start what should listen there: for /_hbone/22 an sshd, which krun has with SSH_AUTH or the Secret "
        "sshdebug; for /_hbone/15003 the mTLS end.",
    )
    KRUN_FULL = (
        Hop.DIAL,
        "krun is at a limit of its own.",
        "Raise the limit that the detail names.",
    )
    DIAL_FAILED = (
        Hop.DIAL,
        "krun could not open the tunnel.",
        "The detail is krun's; its log says more.",
    )
    SSH_SILENT = (
        Hop.SSH,
        "What listens there accepts the connection and says nothing.",
        "Check that it is an sshd, and that it is not overloaded.",
    )
    SSH_CLOSED = (
        Hop.SSH,
        "The sshd ends the connection before it has said its version.",
        "Look at its log: host keys that cannot be read, MaxStartups, or a start that failed.",
    )
    NOT_SSH = (
        Hop.SSH,
        "What listens there is no SSH server.",
        "Set HBONE_SSHD to the sshd's address.",
    )

    # The gateway.

    NO_ROUTE = (
        Hop.SNI,
        "The gateway has no route for the name.",
        "Add a route, or correct the name: hgate explain --sni NAME.",
    )
    NOT_GATEWAY = (
        Hop.SNI,
        "What listens there ends the connection without a word of TLS.",
        "Check the port: hgate's SNI ports are 15443 and 15442; its limits and its drain reset connections, "
        "too.",
    )
    GATEWAY_SILENT = (
        Hop.SNI,
        "The gateway accepts the connection and does not answer in TLS.",
        "Look at hgate's log; is the workload starting, or is the port another program's?",
    )
    ROUTE_DENIED = (
        Hop.ROUTE,
        "The service refuses the gateway: its token or its role (401 or 403).",
        "Run hgate doctor in the gateway.",
    )
    ROUTE_FAILED = (
        Hop.ROUTE,
        "The gateway cannot reach the service, or get a token for it.",
        "Run hgate doctor in the gateway; hgate's access log has the reason.",
    )
    PEER_UNTRUSTED = (
        Hop.PEER,
        "The mTLS peer's certificate is from another authority than the roots given, or is not valid now.",
        "Give the mesh's roots with --ca; hbone certs FOLDER shows them.",
    )
    PEER_IDENTITY = (
        Hop.PEER,
        "The mTLS peer is another workload than was expected.",
        "Correct --peer, or the route that leads to that workload.",
    )
    PEER_ALPN = (
        Hop.PEER,
        "The peer, or the gateway's route, speaks none of the protocols that were offered (ALPN).",
        "Look at the name of the workload's port in the mesh; it says what is spoken there.",
    )
    PEER_FAILED = (
        Hop.PEER,
        "The TLS handshake with the peer failed.",
        "The detail is OpenSSL's; the log of krun or Envoy says more.",
    )
    CERTIFICATE_WANTED = (
        Hop.POLICY,
        "The mTLS peer wants a client certificate, and none was shown.",
        "Show one with --cert and --key.",
    )
    CERTIFICATE_REFUSED = (
        Hop.POLICY,
        "The mTLS peer does not accept the client's certificate.",
        "Check who issued it and when it ends: hbone certs FOLDER.",
    )
    POLICY_DENIED = (
        Hop.POLICY,
        "The mTLS peer's policy does not allow this client.",
        "Look at the AuthorizationPolicies of the workload, and HBONE_ALLOW and HBONE_DENY of krun.",
    )


class Failed(Exception):
    """A hop has failed; `str` is what was observed, one line, without secrets."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
