"""A real mesh on one machine: `make mesh`.

etcd, kube-apiserver and istiod as the control plane, pilot-agents with Envoy as sidecars, and hgate, krun and
`hbone cloudrun` between them, each in the network namespace of the machine that it would be on:

    NAMESPACE   ADDRESS    WHAT RUNS THERE
    cp          10.77.0.1  the control plane, hgate, Cloud Run's front end and metadata server, pytest itself
    web         10.77.0.2  a client with its sidecar, account clients/web
    app         10.77.0.3  the container on Cloud Run: krun, its mTLS end, the app
    guest       10.77.0.4  another client, account clients/guest
    echo        10.77.0.6  a gRPC server without a sidecar, account demo/echo

`run` makes the namespaces and starts pytest in the first; `build` gets the programs; `control_plane`, `path`
and `programs` start what runs there; the tests ask from the clients.
"""
