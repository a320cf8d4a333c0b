"""An API server in memory. Whoever speaks with it has a line of its own, whose watches a test can
hold back, silence and break."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpufleet.errors import Conflict, NotFound, ProviderUnavailable
from tpufleet.kubernetes.connections import Json, ResourceKind

ResourceKey = tuple[str, str]


class FakeApiServer:
    """Versions count upwards over all kinds, as etcd's do."""

    def __init__(self) -> None:
        self.moved = threading.Condition()
        self.version = 100
        self.items: dict[ResourceKind, dict[ResourceKey, Json]] = {}
        self.events: list[tuple[int, ResourceKind, str, Json]] = []

    def put(self, kind: ResourceKind, item: Json) -> Json:
        """Made, or changed, by whoever."""
        with self.moved:
            known = self.items.setdefault(kind, {})
            key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
            kept = copy.deepcopy(item)
            self._tell(kind, "MODIFIED" if key in known else "ADDED", kept)
            kept["metadata"].setdefault("uid", f"uid-{self.version}")
            known[key] = kept
            return copy.deepcopy(kept)

    def drop(self, kind: ResourceKind, key: ResourceKey) -> None:
        with self.moved:
            gone = self.items.get(kind, {}).pop(key, None)
            if gone is None:
                raise NotFound(f"no {kind.name} {key}")
            self._tell(kind, "DELETED", copy.deepcopy(gone))

    def _tell(self, kind: ResourceKind, what: str, item: Json) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, what, item))
        self.moved.notify_all()


class FakeConnection:
    """As a Connection. `asked`: the kinds that were listed; `watching`: those whose watch works;
    `took`: the version of the last news that each has taken in; `meanwhile`: what happens while
    the next list is on its way."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.longest_silence = 1000.0
        self._held: dict[ResourceKind, int] = {}  # and how much news comes all the same
        self._broken: set[ResourceKind] = set()
        self.delivered: dict[ResourceKind, int] = {}
        self.listed: list[ResourceKind] = []
        self.watching: set[ResourceKind] = set()
        self.during_list: Callable[[], None] | None = None
        self._interrupted: set[threading.Thread] = set()
        self._handed: list[tuple[Json, Json]] = []

    def modified(self) -> list[Json]:
        """What was handed out and changed since by who got it."""
        return [now for now, then in self._handed if now != then]

    def pause(self, *kinds: ResourceKind, after: int = 0) -> None:
        """From now on these watches say nothing, `but` so much; all others speak."""
        with self.server.moved:
            self._held = dict.fromkeys(kinds, after)
            self.server.moved.notify_all()

    def break_watches(self, *kinds: ResourceKind) -> None:
        """These cannot be watched; all others can."""
        with self.server.moved:
            self._broken = set(kinds)
            self.server.moved.notify_all()

    # What a Connection does.

    def list(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, Any] | None = None,
    ) -> tuple[list[Json], str]:
        with self.server.moved:
            self.listed.append(kind)
            known = self.server.items.get(kind, {}).values()
            found = [self._hand(one) for one in known if _matches(one, namespace, labels)]
            version = self.server.version
        meanwhile, self.during_list = self.during_list, None
        if meanwhile is not None:
            meanwhile()
        return found, str(version)

    def watch(
        self, kind: ResourceKind, version: str, namespace: str | None = None, *,
        labels: Mapping[str, Any] | None = None, began: Callable[[], None],
    ) -> Iterator[tuple[str, Json]]:  # fmt: skip
        at, mine = int(version), threading.current_thread()
        while True:
            with self.server.moved:
                if kind in self._broken:
                    self.watching.discard(kind)
                    raise ProviderUnavailable(f"cannot watch {kind.plural}: broken by the test")
                if mine in self._interrupted:
                    return
                begins = kind not in self.watching
                self.watching.add(kind)
                news = self._next(kind, at)
                if news is None and not begins:
                    self.server.moved.wait()
                    continue
            if begins:
                began()
            if news is not None:
                at, _, what, item = news
                if _matches(item, namespace, labels):
                    yield what, self._hand(item)
                self.delivered[kind] = at

    def _next(self, kind: ResourceKind, after: int) -> tuple[int, ResourceKind, str, Json] | None:
        events = (event for event in self.server.events if event[0] > after and event[1] == kind)
        found = next(events, None)
        if found is None or kind not in self._held:
            return found
        self._held[kind] -= 1
        return found if self._held[kind] >= 0 else None

    def interrupt(self, thread: threading.Thread) -> None:
        with self.server.moved:
            self._interrupted.add(thread)
            self.server.moved.notify_all()

    def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        with self.server.moved:
            found = self.server.items.get(kind, {}).get((namespace, name))
            return copy.deepcopy(found)

    def create(self, kind: ResourceKind, resource: Json) -> Json:
        metadata = resource["metadata"]
        if self.find(kind, metadata["name"], metadata.get("namespace", "")) is not None:
            raise Conflict(f"{kind.name} {metadata['name']} is there already")
        return self.server.put(kind, resource)

    def patch(self, kind: ResourceKind, name: str, change: Json, namespace: str = "") -> Json:
        with self.server.moved:
            now = self.find(kind, name, namespace)
            if now is None:
                raise NotFound(f"no {kind.name} {name}")
            wanted = change.get("metadata", {}).get("resourceVersion")
            if wanted not in (None, now["metadata"]["resourceVersion"]):
                raise Conflict(f"{kind.name} {name} was changed since")
            return self.server.put(kind, _merged(now, change))

    def delete(self, kind: ResourceKind, name: str, namespace: str = "") -> None:
        try:
            self.server.drop(kind, (namespace, name))
        except NotFound:
            return

    def _hand(self, item: Json) -> Json:
        handed = copy.deepcopy(item)
        self._handed.append((handed, copy.deepcopy(item)))
        return handed


def _matches(item: Json, namespace: str | None, labels: Mapping[str, Any] | None) -> bool:
    metadata = item["metadata"]
    mine = metadata.get("labels") or {}
    here = namespace is None or metadata.get("namespace") == namespace
    return here and all(mine.get(key) == value for key, value in (labels or {}).items())


def _merged(whole: Any, change: Any) -> Any:
    """A merge patch."""
    if not isinstance(change, dict):
        return change
    merged = dict(whole) if isinstance(whole, dict) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
