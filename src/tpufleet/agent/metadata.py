"""The metadata server of a machine: who this host is, and the notices that it is to be taken.

Notices come by hanging GET: the server answers when the value changes, so they are known at once.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event

from tpufleet.agent import settings, threads
from tpufleet.errors import BadInput
from tpufleet.model.hosts import NoticeKind

METADATA_ROOT = "/computeMetadata/v1/instance/"
# Longer than this, proxies and clocks begin to interfere; then it is simply asked again.
HANG_SECONDS = 60
ANSWER_SECONDS = 5.0
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0
COORDINATOR_PORT = 8476  # what JAX uses on TPU VMs


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

    def wait_for_change(self, path: str, known: str) -> tuple[str, str]:
        """The value and its tag, as soon as the tag is not the known one, or after a while."""
        query = {
            "wait_for_change": "true",
            "last_etag": known or "0",
            "timeout_sec": str(HANG_SECONDS),
        }
        return self._get(path, query, HANG_SECONDS + ANSWER_SECONDS)

    def _get(self, path: str, query: Mapping[str, str], seconds: float) -> tuple[str, str]:
        target = self._url + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(target, headers={"Metadata-Flavor": "Google"})
        # Never through a proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=seconds) as answer:
            return answer.read().decode(), answer.headers.get("ETag", "")


class MetadataNoticeWatcher:
    """Watches `preempted` and `maintenance-event`."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata

    def watch(self, seen: Callable[[NoticeKind], None], ended: Event) -> None:
        threads.start(
            "maintenance notices",
            lambda: self._follow("maintenance-event", _maintenance, seen, ended),
        )
        self._follow("preempted", _preempted, seen, ended)

    def _follow(
        self,
        path: str,
        meaning: Callable[[str], NoticeKind | None],
        seen: Callable[[NoticeKind], None],
        ended: Event,
    ) -> None:
        tag, told, wait = "", None, FIRST_WAIT
        while not ended.is_set():
            try:
                value, tag = self._metadata.wait_for_change(path, tag)
            except (OSError, ValueError) as error:
                threads.log(f"the metadata server does not tell of {path}: {error}")
                ended.wait(wait)
                wait = min(wait * 2, LONGEST_WAIT)
                continue
            wait = FIRST_WAIT
            kind = meaning(value.strip())
            if kind is not None and kind is not told:
                seen(kind)
            told = kind


def _preempted(value: str) -> NoticeKind | None:
    return NoticeKind.PREEMPTED if value.upper() == "TRUE" else None


def _maintenance(value: str) -> NoticeKind | None:
    return NoticeKind.MAINTENANCE if value and value.upper() != "NONE" else None


def complete_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent, with what it lacks taken from the metadata server that it
    names. The slice's word comes along: whoever runs here could read it there as well."""
    metadata = MetadataClient(environ["TPUFLEET_METADATA"])
    try:
        found = _identity(metadata)
        tokens = _mapping(metadata.get("attributes/tpufleet-tokens"))
    except OSError as error:
        raise BadInput(f"the metadata server cannot be read: {error}") from error
    work = Path(environ.get("TPUFLEET_WORK", "/var/lib/tpufleet/work"))
    found["TPUFLEET_WORK"] = str(work)
    given = {key: value for key, value in environ.items() if value}
    word = tokens.get(found["TPUFLEET_SLICE"], "")
    if not word:
        raise BadInput(f"the metadata has no word for slice {found['TPUFLEET_SLICE']}")
    return {**found, **given, settings.BOOTSTRAP_TOKEN_VARIABLE: word}


def _identity(metadata: MetadataClient) -> dict[str, str]:
    def attribute(name: str, fallback: str = "") -> str:
        return (metadata.get(f"attributes/{name}") or fallback).strip()

    slices = _names(attribute("tpufleet-slices", "[]"))
    return {
        "TPUFLEET_SERVER": attribute("tpufleet-server"),
        "TPUFLEET_SLICE": _own_slice(slices, attribute("tpu-env")),
        "TPUFLEET_HOST_INDEX": attribute("agent-worker-number", "0"),
        "TPUFLEET_HOSTS": attribute("tpufleet-hosts", "1"),
        "TPUFLEET_CHIPS": attribute("tpufleet-chips"),
        "TPUFLEET_ADDRESS": (metadata.get("network-interfaces/0/ip") or "").strip(),
        "TPUFLEET_COORDINATOR_PORT": str(COORDINATOR_PORT),
    }


def _own_slice(slices: list[str], tpu_env: str) -> str:
    """The only slice, or the one at this node's number in the gang."""
    if len(slices) == 1:
        return slices[0]
    named = re.search(r"^NODE_ID:\s*'?([^'\n]+)'?\s*$", tpu_env, re.MULTILINE)
    number = named[1].rpartition("-")[2] if named else ""
    if number.isdecimal() and int(number) < len(slices):
        return slices[int(number)]
    raise BadInput(f"the metadata does not say which of {len(slices)} slices this host is of")


def _names(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise BadInput("tpufleet-slices in the metadata is not a list of names")
    return found


def _mapping(text: str | None) -> dict[str, str]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInput("tpufleet-tokens in the metadata cannot be read")
    return {str(key): str(value) for key, value in found.items()}
