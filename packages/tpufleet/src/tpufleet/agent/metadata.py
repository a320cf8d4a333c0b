"""The instance metadata server: the identity of this host and the values that change."""

from __future__ import annotations

import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from tpufleet.agent import settings
from tpufleet.errors import BadInput, unreadable

T = TypeVar("T")
METADATA_ROOT = "/computeMetadata/v1/instance/"
# Beyond this, proxies and clocks begin to interfere; the request is simply repeated.
HANG_SECONDS = 60
ANSWER_SECONDS = 5.0
# JAX's own until 0.8.0. Its present one, 8482, is not among the ports that Google's firewall rule
# opens between the hosts of a slice (github.com/jax-ml/jax/issues/35905).
COORDINATOR_PORT = 8476


class MetadataClient:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + METADATA_ROOT

    def get(self, path: str) -> str | None:
        """None when there is no such value."""
        try:
            return self._get(path, {}, ANSWER_SECONDS)[0]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def wait_for_change(self, path: str, last_etag: str) -> tuple[str, str]:
        """The value and its ETag, once the ETag differs from `last_etag` or the request times
        out."""
        query = {
            "wait_for_change": "true",
            "last_etag": last_etag or "0",
            "timeout_sec": str(HANG_SECONDS),
        }
        return self._get(path, query, HANG_SECONDS + ANSWER_SECONDS)

    def put_guest_attribute(self, namespace: str, key: str, value: str) -> None:
        """Readable from outside through the cloud's API."""
        request = urllib.request.Request(
            f"{self._url}guest-attributes/{namespace}/{key}",
            data=value.encode(),
            headers={"Metadata-Flavor": "Google"},
            method="PUT",
        )
        with _direct().open(request, timeout=ANSWER_SECONDS):
            pass

    def _get(self, path: str, query: Mapping[str, str], timeout: float) -> tuple[str, str]:
        target = self._url + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(target, headers={"Metadata-Flavor": "Google"})
        with _direct().open(request, timeout=timeout) as response:
            return response.read().decode(), response.headers.get("ETag", "")


def _direct() -> urllib.request.OpenerDirector:
    """Never through a proxy: the server is on this machine."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def complete_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Fill in the agent's variables from the metadata server that `environ` names.

    The bootstrap token comes along: every process here can read it from the server too.
    """
    metadata = MetadataClient(environ["TPUFLEET_METADATA"])
    try:
        identity = _identity(metadata)
        tokens = metadata.get("attributes/tpufleet-tokens") or "{}"
    except OSError as error:
        raise unreadable("the metadata server", error) from error
    identity["TPUFLEET_WORK"] = str(Path(environ.get("TPUFLEET_WORK", "/var/lib/tpufleet/work")))
    explicit = {key: value for key, value in environ.items() if value}
    slice_id = identity["TPUFLEET_SLICE"]
    bootstrap_token = _parse("tpufleet-tokens", tokens, dict[str, str]).get(slice_id, "")
    if not bootstrap_token:
        raise BadInput(f"metadata tpufleet-tokens has no bootstrap token for slice {slice_id}")
    return {**identity, **explicit, settings.BOOTSTRAP_TOKEN_VARIABLE: bootstrap_token}


def _identity(metadata: MetadataClient) -> dict[str, str]:
    def attribute(name: str, fallback: str = "") -> str:
        return (metadata.get(f"attributes/{name}") or fallback).strip()

    slices = _parse("tpufleet-slices", attribute("tpufleet-slices", "[]"), list[str])
    tpu_env, hosts = attribute("tpu-env"), attribute("tpufleet-hosts", "1")
    endpoints = attribute("worker-network-endpoints")
    return {
        "TPUFLEET_SERVER": attribute("tpufleet-server"),
        "TPUFLEET_SLICE": _own_slice(slices, tpu_env),
        "TPUFLEET_HOST_INDEX": _worker_number(attribute, hosts, tpu_env),
        "TPUFLEET_HOSTS": hosts,
        "TPUFLEET_CHIPS": attribute("tpufleet-chips"),
        "TPUFLEET_ADDRESS": (metadata.get("network-interfaces/0/ip") or "").strip(),
        "TPUFLEET_COORDINATOR_PORT": str(COORDINATOR_PORT),
        "TPUFLEET_MULTISLICE": "1" if re.search(r"^MEGASCALE_NUM_SLICES:", tpu_env, re.M) else "",
        "TPUFLEET_BARE_ENDPOINTS": "1" if endpoints and ":" not in endpoints else "",
        settings.CA_VARIABLE: attribute("tpufleet-ca"),
    }


def _worker_number(attribute: Callable[[str], str], hosts: str, tpu_env: str) -> str:
    """Where the Cloud TPU API writes it, or Compute Engine: there only once the chips of the slice
    are joined, which may be after a host has booted."""
    found = attribute("agent-worker-number") or attribute("worker-id")
    match = re.search(r"^(?:TPU_)?WORKER_ID:\s*'?([0-9]+)'?\s*$", tpu_env, re.MULTILINE)
    number = found or (match[1] if match else "")
    if not number and hosts != "1":
        raise BadInput("the metadata server has no worker-id yet: the slice is not complete")
    return number or "0"


def _own_slice(slices: list[str], tpu_env: str) -> str:
    """The only slice, or the one at this node's index in the gang."""
    if len(slices) == 1:
        return slices[0]
    match = re.search(r"^NODE_ID:\s*'?([^'\n]+)'?\s*$", tpu_env, re.MULTILINE)
    index = match[1].rpartition("-")[2] if match else ""
    if index.isdecimal() and int(index) < len(slices):
        return slices[int(index)]
    raise BadInput(
        f"cannot tell which of {len(slices)} slices this host belongs to: "
        "metadata tpu-env has no NODE_ID that ends in a slice index"
    )


def _parse(name: str, text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise BadInput(f"metadata {name}: {error}") from error
