"""CRDs and webhooks of JobSet, Kueue and LeaderWorkerSet, and the KWOK stages, as upstream ships
them, with webhooks changed to call processes on loopback."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tpufleet_testbed.kubernetes.binaries import Build
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout

Document = dict[str, Any]

JOBSET, KUEUE, KWOK = "sigs.k8s.io/jobset", "sigs.k8s.io/kueue", "sigs.k8s.io/kwok"
LWS = "sigs.k8s.io/lws"
STAGES = Path(__file__).parent / "stages.yaml"
# Kueue kinds project storage version differs from the version that users write.
CONVERTED = {"localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters"}
# The webhook of a disabled integration would reject its objects.
KUEUE_WEBHOOKS = {"job", "jobset", "workload", "clusterqueue", "cohort", "resourceflavor"}
# Limits pod webhooks to pods of JobSets and LeaderWorkerSets.
JOBSET_PODS = {
    "matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]
}
LEADER_WORKER_SET_PODS = {
    "matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]
}


def extension_manifests(build: Build, layout: ControlPlaneLayout) -> list[Document]:
    authority = _authority(layout)
    manifests: list[Document] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        for name in ("jobset-system", "kueue-system")
    ]
    jobset = (layout.ports["jobset_webhook"], authority, "jobset", JOBSET_PODS)
    kueue = (layout.ports["kueue_webhook"], authority)
    manifests += [
        _with_local_webhooks(document, *jobset) for document in _read(build.manifests(JOBSET))
    ]
    manifests += [_kueue(document, *kueue) for document in _read(build.manifests(KUEUE))]
    return manifests


def leader_worker_set_manifests(build: Build, layout: ControlPlaneLayout) -> list[Document]:
    args = (layout.ports["lws_webhook"], _authority(layout), "lws", LEADER_WORKER_SET_PODS)
    return [_with_local_webhooks(document, *args) for document in _read(build.manifests(LWS))]


def to_yaml(documents: Iterable[Document]) -> str:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump_all(documents, Dumper=dumper))


def _authority(layout: ControlPlaneLayout) -> str:
    return base64.b64encode((layout.pki / "ca.crt").read_bytes()).decode()


def kwok_stages(build: Build) -> list[Document]:
    return list(_read([*build.manifests(KWOK), STAGES]))


def _with_local_webhooks(
    document: Document, port: int, authority: str, project: str, own_pods: Document
) -> Document:
    """Point the webhooks at loopback; pod webhooks see only pods matched by `own_pods`."""
    if document["kind"] == "CustomResourceDefinition":
        return document
    webhooks = []
    for hook in document["webhooks"]:
        hook = {**hook, "clientConfig": _local_client_config(hook["clientConfig"], port, authority)}
        if "pod" in hook["name"]:
            hook["objectSelector"] = own_pods
        webhooks.append(hook)
    return _with_prefix(document, project) | {"webhooks": webhooks}


def _kueue(document: Document, port: int, authority: str) -> Document:
    if document["kind"] == "CustomResourceDefinition":
        if document["spec"]["names"]["plural"] not in CONVERTED:
            return document
        convert = {"url": f"https://127.0.0.1:{port}/convert", "caBundle": authority}
        webhook = {"conversionReviewVersions": ["v1"], "clientConfig": convert}
        conversion = {"strategy": "Webhook", "webhook": webhook}
        return document | {"spec": document["spec"] | {"conversion": conversion}}
    webhooks = [
        hook | {"clientConfig": _local_client_config(hook["clientConfig"], port, authority)}
        for hook in document["webhooks"]
        if hook["name"].split(".")[0][1:] in KUEUE_WEBHOOKS  # mjob…, vjob…
    ]
    return _with_prefix(document, "kueue") | {"webhooks": webhooks}


def _with_prefix(document: Document, project: str) -> Document:
    metadata = document["metadata"]
    return document | {"metadata": metadata | {"name": f"{project}-{metadata['name']}"}}


def _local_client_config(config: Document, port: int, authority: str) -> Document:
    path = config["service"].get("path", "/")
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}


def _read(paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        for document in yaml.load_all(path.read_text(), Loader=_LOADER):
            if document:
                yield document


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
