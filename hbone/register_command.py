"""`hbone register`: writes the Service that asks hgate for a way out of the cluster, and prints what hgate
says.

The Service is written by server-side apply, so what others own of it stays theirs. Everything else is hgate's
to make, unless --print asks for the whole set.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from hbone import registered_service
from hbone.output import write
from hbone.registered_service import RegisteredService
from shared import loop
from shared.cluster.mesh_objects import path_of
from shared.cluster.service_annotations import AMBIENT_SERVICE, HGATE, REFUSED, REGISTER, STATUS
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_discovery import find_access
from shared.credentials.kubernetes.kubernetes_names import check_namespace
from shared.errors import (
    EXIT_DENIED,
    EXIT_OK,
    RefusedError,
    StatusError,
    UnavailableError,
    UsageError,
)
from shared.ops.log import one_line

POLL_S = 0.5
"""Between two looks at the status."""

UNCHANGED_S = 5.0
"""So long an old status is not believed after a change: hgate takes two seconds to write the new one, and
writes nothing if it is the same."""

Object = Mapping[str, Any]


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Does what the options say; returns the exit code.

    Raises:
        UsageError: a flag is wrong.
        ConflictError, RefusedError: the Service, or a field of it, is somebody else's.
        HboneError: the cluster cannot be asked, or says no, or no hgate has said anything in time.
    """
    if options.print:
        return _print(options)
    for flag, value in (("--gateway", options.gateway), ("--domain", options.domain)):
        if value is not None:
            raise UsageError(f"{flag} has a meaning with --print only: hgate in the cluster knows it")
    # What is wrong on the command line is said before the cluster is looked for.
    name = registered_service.name_of(options)
    if not options.remove:
        registered_service.read(options, "")
    api = KubernetesApi(find_access(environ))
    namespace = _namespace(options.namespace or api.access.namespace)
    if options.remove:
        return loop.run(_remove(api, namespace, name))
    service = registered_service.read(options, namespace)
    return loop.run(_write(api, service, None if options.no_wait else options.timeout))


def _print(options: argparse.Namespace) -> int:
    import yaml

    if options.namespace is None:
        raise UsageError("--print needs --namespace, for no cluster is asked")
    if not options.gateway:
        raise UsageError("--print needs --gateway: kubectl get service hgate tells the address")
    service = registered_service.read(options, _namespace(options.namespace))
    gateways, domain = registered_service.gateways(options.gateway), options.domain or "cluster.local"
    route = yaml.safe_dump([service.route(domain)], sort_keys=False, width=1000)
    note = "".join(f"#   {line}\n" for line in route.splitlines())
    manifests = yaml.safe_dump_all(service.all_manifests(gateways, domain), sort_keys=False)
    write(sys.stdout, f"# Without cluster: in its file, hgate needs this route:\n{note}{manifests}")
    return EXIT_OK


def _namespace(name: str) -> str:
    try:
        return check_namespace(name)
    except ValueError as error:
        raise UsageError(f"--namespace {name} is {error}") from error


async def _write(api: KubernetesApi, service: RegisteredService, timeout_s: float | None) -> int:
    manifest = service.manifest()
    path, what = path_of(manifest), f"Service {service.namespace}/{service.name}"
    before = await _found(api, path)
    if before is not None:
        _demand_no_endpoints(before, what)
    now = await api.apply(path, manifest, REGISTER)
    is_new = before is None or _version(before) != _version(now)
    _row("service", f"{what[8:]} {_ports(service)}: {'written' if is_new else 'as it was'}, at {api.server}")
    _row("leads to", service.tunnel)
    if timeout_s is None:
        jsonpath = "{.metadata.annotations.hbone\\.dev/status}"
        ask = f"kubectl -n {service.namespace} get service {service.name} -o jsonpath='{jsonpath}'"
        _row("next", f"hgate says in an annotation what it made of it: {ask}")
        return EXIT_OK
    status = await _status(api, path, _said(before) if is_new else "", timeout_s)
    if not status:
        raise UnavailableError(
            f"no hgate has said anything about {what} within {timeout_s:g} s: does one run with cluster: in "
            "its file? The Service stays, and hgate sees it whenever it comes"
        )
    _row("status", one_line(status))
    return EXIT_DENIED if status.startswith(REFUSED) else EXIT_OK


async def _status(api: KubernetesApi, path: str, old: str, timeout_s: float) -> str:
    """What hgate says, empty if it says nothing; `old` is what it said before a change."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        said = _said(await _found(api, path))
        waited_s = clock() - began
        if said and (said != old or waited_s >= min(UNCHANGED_S, timeout_s)):
            return said
        if waited_s >= timeout_s:
            return ""
        await asyncio.sleep(min(POLL_S, timeout_s - waited_s))


async def _remove(api: KubernetesApi, namespace: str, name: str) -> int:
    about = {"name": name, "namespace": namespace}
    nothing = {"apiVersion": "v1", "kind": "Service", "metadata": about}
    path, what = path_of(nothing), f"Service {namespace}/{name}"
    there = await _found(api, path)
    if there is None:
        raise UnavailableError(f"there is no {what}")
    owners = _owners(there)
    if REGISTER not in owners:
        raise RefusedError(f"{what} is not hbone register's: {', '.join(owners) or 'nobody'} wrote it")
    others = [owner for owner in owners if owner != REGISTER and not _is_hgate(owner)]
    if others:
        await api.apply(path, nothing, REGISTER)
        _row(
            "service",
            f"{what[8:]}: the annotations are removed; it stays, for it is {', '.join(others)}'s too",
        )
        return EXIT_OK
    stated = {"uid": there["metadata"]["uid"], "resourceVersion": _version(there)}
    await api.ask("DELETE", path, {"preconditions": stated})
    _row("service", f"{what[8:]}: removed, and the cluster removes what hgate has registered for it")
    return EXIT_OK


async def _found(api: KubernetesApi, path: str) -> Object | None:
    try:
        return await api.ask("GET", path)
    except StatusError as error:
        if error.status == 404:
            return None
        raise


def _demand_no_endpoints(there: Object, what: str) -> None:
    selector = (there.get("spec") or {}).get("selector") or {}
    if selector and selector.keys() != {AMBIENT_SERVICE}:
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        raise RefusedError(f"{what} is there, for the pods {one_line(labels)}: choose another --name")


def _owners(there: Object) -> list[str]:
    """Who owns fields of an object, its status aside, in the order in which the server tells it."""
    fields = there["metadata"].get("managedFields") or ()
    return list(dict.fromkeys(one_line(one["manager"]) for one in fields if not one.get("subresource")))


def _is_hgate(owner: str) -> bool:
    """Whether a field manager is one of hgate's, which has several for its several tasks."""
    return owner == HGATE or owner.startswith(f"{HGATE}-")


def _version(there: Object) -> str:
    return str(there["metadata"]["resourceVersion"])


def _said(there: Object | None) -> str:
    return str(((there or {}).get("metadata") or {}).get("annotations", {}).get(STATUS, ""))


def _ports(service: RegisteredService) -> str:
    return ", ".join(f"{one.name}:{one.number}" for one in service.ports)


def _row(name: str, text: str) -> None:
    write(sys.stdout, f"{name:<10} {text}\n")
