"""An in-memory API server, and connections to it whose watches a test can pause and break."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tpufleet.errors import Conflict, NotFound, ProviderUnavailable
from tpufleet.kubernetes.connections import Json, ResourceKind

ResourceKey = tuple[str, str]


class FakeApiServer:
    """One version counter for all kinds, like etcd."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 100
        self.items: dict[ResourceKind, dict[ResourceKey, Json]] = {}
        self.events: list[tuple[int, ResourceKind, str, Json]] = []

    def put(self, kind: ResourceKind, item: Json) -> Json:
        """Create or replace."""
        with self.changed:
            known = self.items.setdefault(kind, {})
            key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
            kept = copy_json(item)
            self._publish(kind, "MODIFIED" if key in known else "ADDED", kept)
            kept["metadata"].setdefault("uid", f"uid-{self.version}")
            known[key] = kept
            return copy_json(kept)

    def drop(self, kind: ResourceKind, key: ResourceKey) -> None:
        with self.changed:
            gone = self.items.get(kind, {}).pop(key, None)
            if gone is None:
                raise NotFound(f"no {kind.name} {key}")
            self._publish(kind, "DELETED", copy_json(gone))

    def _publish(self, kind: ResourceKind, event_type: str, item: Json) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, event_type, item))
        self.changed.notify_all()


class FakeConnection:
    """Stands in for a Connection.

    `listed`: kinds in the order they were listed; `watching`: kinds whose watch is open;
    `watch_attempts`: watches that were requested; `delivered`: version of the last event delivered
    per kind; `during_list`: called while the next list is under way.
    """

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.max_silence = 1000.0
        self._paused: dict[ResourceKind, int] = {}  # and how many events still get through
        self._broken: set[ResourceKind] = set()
        self.delivered: dict[ResourceKind, int] = {}
        self.listed: list[ResourceKind] = []
        self.watch_attempts = 0
        self.watching: set[ResourceKind] = set()
        self.during_list: Callable[[], None] | None = None
        self._interrupted: set[threading.Thread] = set()
        self._returned: list[tuple[Json, bytes]] = []

    def modified(self) -> list[Json]:
        """Items that the caller changed after they were returned."""
        return [now for now, then in self._returned if now != msgspec.json.decode(then)]

    def pause(self, *kinds: ResourceKind, after: int = 0) -> None:
        """Deliver `after` more events of these kinds, then none; resume all other kinds."""
        with self.server.changed:
            self._paused = dict.fromkeys(kinds, after)
            self.server.changed.notify_all()

    def break_watches(self, *kinds: ResourceKind) -> None:
        """Fail watches of these kinds; repair all others."""
        with self.server.changed:
            self._broken = set(kinds)
            self.server.changed.notify_all()

    # The interface of Connection.

    def list(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[list[Json], str]:
        with self.server.changed:
            self.listed.append(kind)
            known = self.server.items.get(kind, {}).values()
            found = [
                self._return(one)
                for one in known
                if _matches(one, namespace, labels) and _has_fields(one, fields or {})
            ]
            version = self.server.version
        during_list, self.during_list = self.during_list, None
        if during_list is not None:
            during_list()
        return found, str(version)

    def watch(
        self, kind: ResourceKind, version: str, namespace: str | None = None, *,
        labels: Mapping[str, Any] | None = None, fields: Mapping[str, Any] | None = None,
        on_connected: Callable[[], None],
    ) -> Iterator[tuple[str, Json]]:  # fmt: skip
        at, thread = int(version), threading.current_thread()
        self.watch_attempts += 1
        while True:
            with self.server.changed:
                if kind in self._broken:
                    self.watching.discard(kind)
                    raise ProviderUnavailable(f"cannot watch {kind.plural}: broken by the test")
                if thread in self._interrupted:
                    return
                connects = kind not in self.watching
                self.watching.add(kind)
                event = self._next(kind, at)
                if event is None and not connects:
                    self.server.changed.wait()
                    continue
            if connects:
                on_connected()
            if event is not None:
                at, _, event_type, item = event
                if _matches(item, namespace, labels) and _has_fields(item, fields or {}):
                    yield event_type, self._return(item)
                self.delivered[kind] = at

    def _next(self, kind: ResourceKind, after: int) -> tuple[int, ResourceKind, str, Json] | None:
        events = (event for event in self.server.events if event[0] > after and event[1] == kind)
        event = next(events, None)
        if event is None or kind not in self._paused:
            return event
        self._paused[kind] -= 1
        return event if self._paused[kind] >= 0 else None

    def interrupt(self, thread: threading.Thread) -> None:
        with self.server.changed:
            self._interrupted.add(thread)
            self.server.changed.notify_all()

    def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        with self.server.changed:
            found = self.server.items.get(kind, {}).get((namespace, name))
            return copy_json(found)

    def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Json:
        found = self.find(kind, name, namespace)
        if found is None:
            raise NotFound(f"no {kind.name} {name}")
        return found

    def create(self, kind: ResourceKind, resource: Json) -> Json:
        metadata = resource["metadata"]
        if self.find(kind, metadata["name"], metadata.get("namespace", "")) is not None:
            raise Conflict(f"{kind.name} {metadata['name']} already exists")
        return self.server.put(kind, resource)

    def patch(self, kind: ResourceKind, name: str, change: Json, namespace: str = "") -> Json:
        with self.server.changed:
            now = self.find(kind, name, namespace)
            if now is None:
                raise NotFound(f"no {kind.name} {name}")
            wanted = change.get("metadata", {}).get("resourceVersion")
            if wanted not in (None, now["metadata"]["resourceVersion"]):
                raise Conflict(f"{kind.name} {name} changed since it was read")
            return self.server.put(kind, _merged(now, change))

    def delete(self, kind: ResourceKind, name: str, namespace: str = "") -> None:
        try:
            self.server.drop(kind, (namespace, name))
        except NotFound:
            return

    def _return(self, item: Json) -> Json:
        encoded = msgspec.json.encode(item)
        copied = msgspec.json.decode(encoded)
        self._returned.append((copied, encoded))
        return copied


def copy_json(item: Any) -> Any:
    """As it is after a journey over the network; in C, since journeys list thousands of times."""
    return msgspec.json.decode(msgspec.json.encode(item))


def _matches(item: Json, namespace: str | None, labels: Mapping[str, Any] | None) -> bool:
    metadata = item["metadata"]
    own = metadata.get("labels") or {}
    in_scope = namespace is None or metadata.get("namespace") == namespace
    return in_scope and all(own.get(key) == value for key, value in (labels or {}).items())


def _has_fields(item: Json, fields: Mapping[str, Any]) -> bool:
    """A field selector such as `spec.nodeName`."""
    for path, value in fields.items():
        found: Any = item
        for key in path.split("."):
            found = (found or {}).get(key)
        if found != value:
            return False
    return True


def _merged(original: Any, change: Any) -> Any:
    """A merge patch."""
    if not isinstance(change, dict):
        return change
    merged = dict(original) if isinstance(original, dict) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
