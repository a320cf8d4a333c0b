"""The client side of the collection: add code, list it, follow it until it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from tpufleet.errors import NotFound
from tpufleet_firestore.bridge import collection, documents
from tpufleet_firestore.bridge.collection import CALL_OPTIONS, translate_errors
from tpufleet_firestore.bridge.documents import LIVE_STATUSES, DocumentStatus

Row = dict[str, Any]
POLL_SECONDS = 2.0


class CodeSubmissions:
    def __init__(self, project: str | None, database: str | None, name: str) -> None:
        self._client = collection.connect(project, database)
        self._documents = self._client.collection(name)

    def add(
        self, code: str, challenge_number: int, timeout: float, metadata: Mapping[str, str]
    ) -> str:
        """Returns the id of the new document."""
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

    def list_newest(self) -> list[Row]:
        with translate_errors():
            query = self._documents.order_by("created_at", direction="DESCENDING").limit(10)
            return [_row(snapshot) for snapshot in query.stream(**CALL_OPTIONS)]

    def show(self, document_id: str) -> Row:
        with translate_errors():
            snapshot = self._documents.document(document_id).get(**CALL_OPTIONS)
        if not snapshot.exists:
            raise NotFound(f"no document {document_id} in collection {self._documents.id}")
        return _row(snapshot)

    def follow(self, document_id: str) -> Iterator[Row]:
        """The document now and at every change of its status, until it has ended."""
        shown = ""
        while True:
            row = self.show(document_id)
            if row.get("status") != shown:
                yield row
            shown = str(row.get("status"))
            if shown not in LIVE_STATUSES:
                return
            time.sleep(POLL_SECONDS)


def _row(snapshot: Any) -> Row:
    return {"id": snapshot.id, **_plain(snapshot.to_dict())}


def _plain(value: Any) -> Any:
    """Without Google's own types, so that it can be written as JSON."""
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
