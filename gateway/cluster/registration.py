"""What is to be registered with the mesh for an annotated Service, and what that takes. No I/O.

`plan` compares what is wanted with what is there, as the API server has both; the caller writes and removes.
The rules:

1. A Service with a selector has endpoints of its own, and nothing is registered for it.
2. All is in the Service's own namespace, and is the Service's by its owner reference.
3. An object that is there and is not ours by label and owner is neither changed nor removed. If it says what
   is wanted, as one of `hbone register --print` does, that will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.address import Address
from shared.cluster.mesh_objects import Manifest, MeshService, ServicePort, manifests, of_annotations
from shared.cluster.service_annotations import AMBIENT_SERVICE, HGATE, MANAGED_BY, ORIGINAL_LABEL, SERVICE
from shared.credentials.kubernetes.kubernetes_names import is_label

MAX_PORTS = 32
"""Of a Service: each is in several objects."""

Object = Mapping[str, Any]


class RegistrationError(ValueError):
    """Why nothing can be registered for a Service, for its Event and its status."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is left to be done for a Service."""

    apply: tuple[Manifest, ...]
    """What is to be written, in this order, by server-side apply."""

    remove: tuple[Object, ...]
    """What was made for it and is no longer wanted."""

    obstacles: tuple[str, ...]
    """What cannot be written, and why, for the Service's Event and its status."""


def plan(
    found: Object, there: Iterable[Object], gateways: Sequence[Address], domain: str = "cluster.local"
) -> Plan:
    """What is to be done for `found`, an annotated Service as the API server has it.

    `there` are the objects of its namespace whose kind is one of `mesh_objects.KINDS`: at least those with
    our label, or with the name of one that is wanted. `gateways` are addresses of hgate's port for mTLS by
    SNI, `domain` is the cluster's. Raises RegistrationError.
    """
    uid = str(found["metadata"]["uid"])
    wanted = manifests(mesh_service(found, gateways, domain), uid)
    objects = {_key(each): each for each in there}
    apply, obstacles, taken = [], [], []
    for each in wanted:
        other = objects.get(_key(each))
        if other is not None and _is_as_wanted(other, each):
            continue
        if other is None or is_ours(other, uid):
            apply.append(each)
        else:
            name = f"{each['kind']} {each['metadata']['namespace']}/{each['metadata']['name']}"
            obstacles.append(f"{name} is somebody else's, and says something else: rename it, or remove it")
            taken.append(each["kind"])
    if "Service" in taken:  # requests to the short name are theirs
        wanted = [each for each in wanted if each["kind"] != "VirtualService"]
        apply = [each for each in apply if each in wanted]
    return Plan(tuple(apply), tuple(superfluous(objects.values(), wanted, uid)), tuple(obstacles))


def mesh_service(found: Object, gateways: Sequence[Address], domain: str = "cluster.local") -> MeshService:
    """What `found`, an annotated Service as the API server has it, is to the mesh. `gateways` are addresses
    of hgate's port for mTLS by SNI; `domain` is the cluster's. Raises RegistrationError."""
    about, spec = found["metadata"], found.get("spec") or {}
    name = str(about["name"])
    selector = spec.get("selector") or {}
    if selector and selector != {AMBIENT_SERVICE: name}:
        raise RegistrationError("it has a selector, so it has endpoints of its own: remove one or the other")
    if spec.get("type") == "ExternalName":
        raise RegistrationError("an ExternalName is another name for another host, and has no endpoints")
    if spec.get("clusterIP") == "None":
        raise RegistrationError("it is headless, so sidecars would dial its endpoints, of which it has none")
    if not gateways:
        raise RegistrationError("hgate's own address is not known")
    short_name = str((about.get("labels") or {}).get(ORIGINAL_LABEL) or "")
    if short_name and not is_label(short_name):
        raise RegistrationError(f"label {ORIGINAL_LABEL} has to be the name of a Service")
    try:
        return of_annotations(
            about.get("annotations") or {},
            *(name, str(about["namespace"]), _ports(spec.get("ports") or ()), gateways),
            short_name="" if short_name == name else short_name,
            domain=domain,
        )
    except ValueError as error:
        raise RegistrationError(str(error)) from error


def is_ours(there: Object, owner_uid: str) -> bool:
    """Whether an object was made for the Service of that uid."""
    return owner_of(there) == owner_uid


def owner_of(there: Object) -> str | None:
    """The uid of the Service that an object was made for; None if it is not of our making. Whoever puts our
    label on an object has not made it ours: it has to have an owner as we write it, too."""
    about = there["metadata"]
    labels = about.get("labels") or {}
    if labels.get(MANAGED_BY) != HGATE:
        return None
    wanted = ("v1", "Service", labels.get(SERVICE))
    for owner in about.get("ownerReferences") or ():
        if (owner.get("apiVersion"), owner.get("kind"), owner.get("name")) == wanted:
            return str(owner.get("uid"))
    return None


def superfluous(there: Iterable[Object], wanted: Iterable[Manifest], owner_uid: str) -> list[Object]:
    """What of the objects in the Service's namespace was made for it, and is no longer wanted."""
    kept = {_key(each) for each in wanted}
    return [each for each in there if is_ours(each, owner_uid) and _key(each) not in kept]


def _is_as_wanted(there: Object, wanted: Manifest) -> bool:
    """Whether an object has all that is wanted of it, whoever its owner is."""
    about = {key: value for key, value in wanted["metadata"].items() if key != "ownerReferences"}
    return _contains(there, {**wanted, "metadata": about})


def _contains(there: Any, wanted: Any) -> bool:
    """Whether `there` is `wanted`, but for fields of mappings that the server or others have added."""
    if isinstance(wanted, dict):
        return isinstance(there, Mapping) and all(
            key in there and _contains(there[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(_contains, there, wanted))
    return bool(there == wanted)


def _key(each: Object) -> tuple[str, str]:
    return str(each["kind"]), str(each["metadata"]["name"])


def _ports(given: Sequence[Mapping[str, Any]]) -> tuple[ServicePort, ...]:
    ports = [one for one in given if one.get("protocol", "TCP") == "TCP"]
    if not ports:
        raise RegistrationError("it has no TCP port")
    if len(ports) > MAX_PORTS:
        raise RegistrationError(f"it has {len(ports)} ports, more than {MAX_PORTS}")
    for one in ports:
        if not one.get("name"):
            raise RegistrationError(
                f"its port {one['port']} has no name, by which Istio knows what is spoken"
            )
    return tuple(
        ServicePort(str(one["name"]), int(one["port"]), str(one.get("appProtocol") or "")) for one in ports
    )
