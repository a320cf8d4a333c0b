"""The client's side of the collection: add code, list it, follow it to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any

from tpufleet.bridges.firestore import collection, documents
from tpufleet.bridges.firestore.collection import CALL_OPTIONS, translate_errors
from tpufleet.bridges.firestore.documents import LIVE_STATUSES, DocumentStatus
from tpufleet.errors import NotFound

Row = dict[str, Any]
POLL_SECONDS = 15.0


class CodeSubmissions:
    def __init__(self, project: str | None, database: str | None, name: str) -> None:
        self._client = collection.connect(project, database)
        self._documents = self._client.collection(name)

    def add(
        self, code: str, challenge_number: int, timeout: float, metadata: Mapping[str, str]
    ) -> str:
        """The id of the new document."""
        from google.cloud import firestore

        fields = {
            "challenge_number": challenge_number,
            "code": code,
            "timeout": timeout,
            "status": DocumentStatus.PENDING.value,
            "created_at": firestore.SERVER_TIMESTAMP,
            "metadata": dict(metadata),
        }
        documents.parse_request(fields)
        with translate_errors():
            reference = self._documents.document()
            reference.create(fields, **CALL_OPTIONS)
        return reference.id

    def list_newest(self, count: int = 10) -> list[Row]:
        with translate_errors():
            query = self._documents.order_by("created_at", direction="DESCENDING").limit(count)
            return [_row(found) for found in query.stream(**CALL_OPTIONS)]

    def show(self, document_id: str) -> Row:
        with translate_errors():
            found = self._documents.document(document_id).get(**CALL_OPTIONS)
        if not found.exists:
            raise NotFound(f"no document {document_id} in {self._documents.id}")
        return _row(found)

    def follow(self, document_id: str) -> Iterator[Row]:
        """The document now and whenever its status has changed, until it has ended."""
        heard: SimpleQueue[Row | None] = SimpleQueue()

        def hear(snapshots: Any, *_: Any) -> None:
            for found in snapshots:
                heard.put(_row(found) if found.exists else None)

        row = self.show(document_id)
        yield row
        watch = self._documents.document(document_id).on_snapshot(hear)
        try:
            while row.get("status") in LIVE_STATUSES:
                try:
                    told = heard.get(timeout=POLL_SECONDS)
                except Empty:  # nothing new, or the listener died without a word
                    told = self.show(document_id)
                if told is None:
                    raise NotFound(f"{document_id} was deleted")
                if told.get("status") != row.get("status"):
                    yield told
                row = told
        finally:
            watch.unsubscribe()


def _row(found: Any) -> Row:
    return {"id": found.id, **_plain(found.to_dict())}


def _plain(value: Any) -> Any:
    """Without Google's own kinds of values, which nobody else can write as JSON."""
    match value:
        case datetime():
            return datetime.fromtimestamp(value.timestamp(), UTC)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case None | str() | bool() | int() | float():
            return value
        case _:
            return str(value)
