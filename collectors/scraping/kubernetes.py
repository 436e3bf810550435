"""Kubernetes objects as JSON -> addresses: what `kubectl get pods|endpoints -o json` writes.

The file may be written by a sidecar or lie in a mounted ConfigMap: nothing here talks to a
cluster. An object is scraped where its annotation `prometheus.io/scrape` is "true"; `port`, `path`
and `scheme` after the same prefix say how. Endpoints carry the annotations of their Service.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Found = tuple[str, dict[str, str]]  # address, labels

_PREFIX = "prometheus.io/"


def kubernetes_addresses(document: object) -> Iterator[Found]:
    """Yield address and labels of each annotated, running pod or ready endpoint.

    Raises ValueError where the document is no object or list of objects of Kubernetes.
    """
    items = _mapping(document).get("items", [document])
    if not isinstance(items, list):
        raise ValueError("items is not a list")
    listed = str(_mapping(document).get("kind", "")).removesuffix("List")
    for item in items:
        kind = str(_mapping(item).get("kind") or listed)
        if kind not in _READERS:
            raise ValueError(f"not Pods, Endpoints or EndpointSlices: {kind!r}")
        yield from _READERS[kind](item)


def _pod(pod: Mapping[str, Any]) -> Iterator[Found]:
    told = _annotations(pod)
    ip = _get(pod, "status", "podIP")
    if told is None or not ip or _get(pod, "status", "phase") != "Running":
        return
    labels = _labels(pod, told) | _some(
        {
            "k8s.pod.name": _get(pod, "metadata", "name"),
            "k8s.pod.uid": _get(pod, "metadata", "uid"),
            "k8s.node.name": _get(pod, "spec", "nodeName"),
        }
    )
    ports = [
        port.get("containerPort")
        for container in _mappings(_get(pod, "spec", "containers"))
        for port in _mappings(container.get("ports"))
        if port.get("protocol", "TCP") == "TCP"
    ]
    yield from _at(ip, ports, told, labels)


def _endpoints(endpoints: Mapping[str, Any]) -> Iterator[Found]:
    told = _annotations(endpoints)
    if told is None:
        return
    labels = _labels(endpoints, told)
    service = _some({"k8s.service.name": _get(endpoints, "metadata", "name")})
    for subset in _mappings(endpoints.get("subsets")):
        ports = [port.get("port") for port in _mappings(subset.get("ports"))]
        for address in _mappings(subset.get("addresses")):
            pod = _some({"k8s.pod.name": _pod_name(address)})
            yield from _at(address.get("ip"), ports, told, labels | service | pod)


def _endpoint_slice(part: Mapping[str, Any]) -> Iterator[Found]:
    told = _annotations(part)
    if told is None:
        return
    owner = _mapping(_get(part, "metadata", "labels") or {}).get("kubernetes.io/service-name")
    labels = _labels(part, told) | _some({"k8s.service.name": owner})
    ports = [port.get("port") for port in _mappings(part.get("ports"))]
    for endpoint in _mappings(part.get("endpoints")):
        if _get(endpoint, "conditions", "ready") is False:
            continue
        pod = _some({"k8s.pod.name": _pod_name(endpoint)})
        for ip in _list(endpoint.get("addresses")):
            yield from _at(ip, ports, told, labels | pod)


_READERS = {"Pod": _pod, "Endpoints": _endpoints, "EndpointSlice": _endpoint_slice}


def _at(
    ip: object, ports: list[Any], told: Mapping[str, str], labels: dict[str, str]
) -> Iterator[Found]:
    """Yield the annotated port, or else each one that is declared."""
    host = f"[{ip}]" if ":" in str(ip) else str(ip)
    declared = [port for port in ports if isinstance(port, int)]
    for port in dict.fromkeys([told["port"]] if "port" in told else declared):
        yield f"{host}:{port}", labels


def _annotations(item: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the annotations after the prefix, or None where they do not ask for scraping."""
    all_of_them = _mapping(_get(item, "metadata", "annotations") or {})
    told = {k.removeprefix(_PREFIX): str(v) for k, v in all_of_them.items() if k[:14] == _PREFIX}
    return told if told.get("scrape", "").lower() == "true" else None


def _labels(item: Mapping[str, Any], told: Mapping[str, str]) -> dict[str, str]:
    how = {"__metrics_path__": told.get("path"), "__scheme__": told.get("scheme")}
    return _some(how | {"k8s.namespace.name": _get(item, "metadata", "namespace")})


def _pod_name(address: Mapping[str, Any]) -> object:
    is_pod = _get(address, "targetRef", "kind") == "Pod"
    return _get(address, "targetRef", "name") if is_pod else None


def _some(values: Mapping[str, object]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str) and value}


def _get(item: object, *path: str) -> Any:
    for name in path:
        item = _mapping(item or {}).get(name)
    return item


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object where Kubernetes has one")
    return value


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [_mapping(item) for item in _list(value)]


def _list(value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError("not a JSON list where Kubernetes has one")
    return value
