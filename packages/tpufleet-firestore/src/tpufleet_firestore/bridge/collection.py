"""Access to Firestore: listening, claims, fenced writes, heartbeats of bridges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tpufleet.errors import BadInput, Fenced, PermissionMissing, Unreachable, unreachable
from tpufleet_firestore.bridge import documents
from tpufleet_firestore.bridge.documents import (
    LIVE_STATUSES,
    SERVER_TIME,
    Document,
    DocumentClaim,
    DocumentStatus,
    Fields,
)

if TYPE_CHECKING:
    from google.cloud import firestore
    from google.cloud.firestore_v1.watch import Watch

# Without Google's silent retries, which take minutes: the bridge retries itself, and logs it.
CALL_OPTIONS: dict[str, Any] = {"timeout": 20.0, "retry": None}
UPDATE_ATTEMPTS = 5
MAX_LIVE_DOCUMENTS = 5000  # per query; more wait for the next resync
DELETE_HEARTBEAT_AFTER = timedelta(hours=1)  # of a dead bridge


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentChange:
    """A document that is live, or (None) no longer is."""

    id: str
    document: Document | None


def connect(project: str | None, database: str | None) -> firestore.Client:
    """With the default credentials, or to the emulator in FIRESTORE_EMULATOR_HOST."""
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import firestore

    try:
        return firestore.Client(project=project, database=database)
    except (DefaultCredentialsError, OSError) as error:
        raise BadInput(
            f"cannot connect to Firestore: {error}; set the project with --project"
        ) from error


class JobCollection:
    """The collection, as seen by one bridge. Thread-safe."""

    def __init__(
        self,
        client: firestore.Client,
        name: str,
        holder: str,
        *,
        dead_after: timedelta,
        adopt_after: timedelta,
    ) -> None:
        from google.cloud import firestore

        self._client = client
        self._server_time = firestore.SERVER_TIMESTAMP
        self._filter = firestore.FieldFilter
        self._documents = client.collection(name)
        self._bridges = client.collection(f"{name}_bridges")
        self._cleanup_mark = client.collection(f"{name}_tidied").document("until")
        self.holder = holder
        self._dead_after = dead_after
        self.adopt_after = adopt_after

    # Reading

    def listen(self, on_changes: Callable[[list[DocumentChange]], None]) -> Watch:
        """Report every live document, then each change, until it is unsubscribed."""

        def on_snapshot(_: Any, changes: Any, __: Any) -> None:
            on_changes(
                [
                    DocumentChange(id=change.document.id, document=None)
                    if change.type.name == "REMOVED"
                    else DocumentChange(id=change.document.id, document=self._read(change.document))
                    for change in changes
                ]
            )

        return self._live_query().on_snapshot(on_snapshot)

    def live_documents(self) -> list[Document]:
        with translate_errors():
            snapshots = self._live_query().limit(MAX_LIVE_DOCUMENTS).stream(**CALL_OPTIONS)
            return [self._read(snapshot) for snapshot in snapshots]

    def get(self, document_id: str) -> Document | None:
        with translate_errors():
            snapshot = self._documents.document(document_id).get(**CALL_OPTIONS)
        return self._read(snapshot) if snapshot.exists else None

    def _live_query(self) -> Any:
        statuses = [status.value for status in LIVE_STATUSES]
        return self._documents.where(filter=self._filter("status", "in", statuses))

    def _read(self, snapshot: Any) -> Document:
        return Document(
            id=snapshot.id,
            path=f"{self._client.project}/{self._client._database}/{snapshot.reference.path}",
            data=snapshot.to_dict(),
            created_at=snapshot.create_time,
            updated_at=snapshot.update_time,
            read_at=snapshot.read_time,
        )

    # Writing. Each update is conditional on the version that was read (optimistic locking). Unlike
    # a transaction, it leaves no lock behind when a bridge dies.

    def claim(self, document_id: str) -> tuple[Document, DocumentClaim] | None:
        """None unless the document is pending or abandoned, or its holder is dead."""

        def decide(document: Document) -> Fields | None:
            if document.status != DocumentStatus.PENDING and not self._may_take_over(document):
                return None
            claim = documents.next_claim(document, self.holder)
            return documents.claim_fields(document, claim) if claim is not None else None

        document = self._update(document_id, decide)
        if document is None:
            return None
        claim = documents.next_claim(document, self.holder)
        assert claim is not None
        return document, claim

    def _may_take_over(self, document: Document) -> bool:
        """Reads the heartbeat again, because the holder may just have started."""
        if document.claim is None:
            return documents.is_abandoned(document, self.adopt_after)
        if document.claim.holder == self.holder:
            return True
        heartbeat = self._bridges.document(document.claim.holder).get(**CALL_OPTIONS)
        return self._is_dead(heartbeat)

    def write(self, document_id: str, claim: DocumentClaim, fields: Fields) -> None:
        """Raises Fenced unless the claim is still valid and the status moves forward."""

        def decide(document: Document) -> Fields:
            if document.claim != claim:
                raise _no_longer_held(document_id, f"claimed by {document.claim}")
            if document.status == fields["status"]:
                return {}  # already written; only the response was lost
            if not documents.is_forward(document.status, fields["status"]):
                raise _no_longer_held(document_id, document.status)
            return fields

        if self._update(document_id, decide) is None:
            raise _no_longer_held(document_id, "deleted")

    def reject(self, document_id: str, fields: Fields) -> bool:
        """Fail an invalid document; False when it is no longer pending."""

        def decide(document: Document) -> Fields | None:
            return fields if document.status == DocumentStatus.PENDING else None

        return self._update(document_id, decide) is not None

    def _update(
        self, document_id: str, decide: Callable[[Document], Fields | None]
    ) -> Document | None:
        """Returns the document before the update; None when it does not exist or `decide` returns
        None. Empty fields mean that nothing needs to be written."""
        from google.api_core import exceptions

        reference = self._documents.document(document_id)
        for _ in range(UPDATE_ATTEMPTS):
            with translate_errors():
                snapshot = reference.get(**CALL_OPTIONS)
                if not snapshot.exists:
                    return None
                document = self._read(snapshot)
                fields = decide(document)
                if fields is None:
                    return None
                unchanged = self._client.write_option(last_update_time=snapshot.update_time)
                try:
                    if fields:
                        resolved = self._resolve_server_time(fields)
                        reference.update(resolved, option=unchanged, **CALL_OPTIONS)
                    return document
                except (exceptions.FailedPrecondition, exceptions.Aborted, exceptions.NotFound):
                    continue  # changed by another writer: read again
        raise Unreachable(f"{document_id} was changed concurrently {UPDATE_ATTEMPTS} times")

    def _resolve_server_time(self, fields: Fields) -> Fields:
        return {
            name: self._server_time if value is SERVER_TIME else value
            for name, value in fields.items()
        }

    # Cleanup of ended documents. A mark in Firestore records how far it has come.

    def ended_before(self, retention: timedelta, limit: int) -> list[Document]:
        """Documents that ended at least `retention` ago by Firestore's clock, after the mark."""
        with translate_errors():
            mark = self._cleanup_mark.get(**CALL_OPTIONS)
            query = self._documents.where(
                filter=self._filter("completed_at", "<=", mark.read_time - retention)
            )
            if mark.exists:
                since = mark.get("completed_at")
                query = query.where(filter=self._filter("completed_at", ">", since))
            snapshots = query.order_by("completed_at").limit(limit).stream(**CALL_OPTIONS)
            return [self._read(snapshot) for snapshot in snapshots]

    def set_cleanup_mark(self, last: Document) -> None:
        with translate_errors():
            self._cleanup_mark.set({"completed_at": last.data["completed_at"]}, **CALL_OPTIONS)

    def remove_result_url(self, document_id: str, version: datetime) -> None:
        """Remove the link to a deleted result, unless the document has changed."""
        from google.api_core import exceptions
        from google.cloud import firestore

        unchanged = self._client.write_option(last_update_time=version)
        with translate_errors():
            try:
                self._documents.document(document_id).update(
                    {"result_url": firestore.DELETE_FIELD}, option=unchanged, **CALL_OPTIONS
                )
            except (exceptions.FailedPrecondition, exceptions.NotFound):
                return

    # Heartbeats, by Firestore's clock alone

    def write_heartbeat(self) -> None:
        with translate_errors():
            self._bridges.document(self.holder).set({"seen_at": self._server_time}, **CALL_OPTIONS)

    def delete_heartbeat(self) -> None:
        """Other bridges then take over the documents at once."""
        with translate_errors():
            self._bridges.document(self.holder).delete(**CALL_OPTIONS)

    def live_bridges(self) -> frozenset[str]:
        """Holders with a recent heartbeat. Deletes heartbeats of bridges that died long ago."""
        with translate_errors():
            heartbeats = list(self._bridges.stream(**CALL_OPTIONS))
            for snapshot in heartbeats:
                if self._is_dead(snapshot, DELETE_HEARTBEAT_AFTER):
                    snapshot.reference.delete(**CALL_OPTIONS)
        return frozenset(snapshot.id for snapshot in heartbeats if not self._is_dead(snapshot))

    def _is_dead(self, heartbeat: Any, after: timedelta | None = None) -> bool:
        if not heartbeat.exists:
            return True
        age = heartbeat.read_time - heartbeat.update_time
        return bool(age > (after or self._dead_after))


class FirestoreQuotaExceeded(Unreachable):
    """Of reads, writes or the free tier: https://cloud.google.com/firestore/quotas."""


def _no_longer_held(document_id: str, state: str) -> Fenced:
    return Fenced(f"{document_id} is no longer held by this bridge: {state}")


@contextmanager
def translate_errors() -> Iterator[None]:
    """BadInput means that the document is invalid, PermissionMissing that someone has to act, and
    Unreachable that a retry may help."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    misconfigured = (
        exceptions.PermissionDenied,
        exceptions.Unauthenticated,
        exceptions.FailedPrecondition,  # wrong database mode, or a missing index
    )
    try:
        yield
    except exceptions.InvalidArgument as error:
        raise BadInput(f"Firestore rejected the request: {error.message}") from error
    except misconfigured as error:
        raise PermissionMissing(
            f"Firestore: {error.message}; grant the account roles/datastore.user"
        ) from error
    except exceptions.ResourceExhausted as error:
        raise FirestoreQuotaExceeded(f"Firestore: {error.message}") from error
    except (GoogleAuthError, exceptions.GoogleAPICallError, exceptions.RetryError) as error:
        raise Unreachable(unreachable("Firestore", error)) from error
