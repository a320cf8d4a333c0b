"""The edge to Firestore: listening, claiming, fenced writes, signs of life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tpufleet.bridges.firestore import documents
from tpufleet.bridges.firestore.documents import (
    LIVE_STATUSES,
    SERVER_TIME,
    Document,
    DocumentClaim,
    DocumentStatus,
    Fields,
)
from tpufleet.errors import BadInput, Fenced, PermissionMissing, Unreachable

if TYPE_CHECKING:
    from google.cloud import firestore

# Google's client would try again for minutes without a word; the bridge tries again by itself, and
# says so.
CALL_OPTIONS: dict[str, Any] = {"timeout": 20.0, "retry": None}
UPDATE_ATTEMPTS = 5
MAX_LIVE_DOCUMENTS = 5000  # documents; more than that wait for the next look
DELETE_HEARTBEAT_AFTER = timedelta(hours=1)  # when the traces of a dead bridge are cleared away


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentChange:
    """A document that is live now, or (None) is not any more."""

    id: str
    document: Document | None


def connect(project: str | None, database: str | None) -> firestore.Client:
    """With the credentials of this machine, or the emulator that FIRESTORE_EMULATOR_HOST names."""
    try:
        from google.cloud import firestore
    except ImportError as error:
        raise BadInput(
            "the Firestore client is not installed; run `pip install 'tpufleet[firestore]'`"
        ) from error
    from google.auth.exceptions import DefaultCredentialsError

    try:
        return firestore.Client(project=project, database=database)
    except (DefaultCredentialsError, OSError) as error:
        raise BadInput(f"no access to Firestore: {error}; name a project with --project") from error


class JobCollection:
    """As one holder of claims sees it. Safe in several threads."""

    def __init__(
        self, client: firestore.Client, name: str, holder: str, dead_after: timedelta
    ) -> None:
        from google.cloud import firestore

        self._client = client
        self._server_time = firestore.SERVER_TIMESTAMP
        self._filter = firestore.FieldFilter
        self._documents = client.collection(name)
        self._bridges = client.collection(f"{name}_bridges")
        self._tidied = client.collection(f"{name}_tidied").document("until")
        self.holder = holder
        self._dead_after = dead_after

    # Reading.

    def listen(self, on_changes: Callable[[list[DocumentChange]], None]) -> CollectionListener:
        """Every live document now, and then each change, until the listener is closed."""

        def on_snapshot(_: Any, changes: Any, __: Any) -> None:
            on_changes(
                [
                    DocumentChange(id=change.document.id, document=None)
                    if change.type.name == "REMOVED"
                    else DocumentChange(id=change.document.id, document=self._read(change.document))
                    for change in changes
                ]
            )

        return CollectionListener(self._live().on_snapshot(on_snapshot))

    def live_documents(self) -> list[Document]:
        with translate_errors():
            found = self._live().limit(MAX_LIVE_DOCUMENTS).stream(**CALL_OPTIONS)
            return [self._read(snapshot) for snapshot in found]

    def get(self, document_id: str) -> Document | None:
        with translate_errors():
            snapshot = self._documents.document(document_id).get(**CALL_OPTIONS)
        return self._read(snapshot) if snapshot.exists else None

    def _live(self) -> Any:
        among = [status.value for status in LIVE_STATUSES]
        return self._documents.where(filter=self._filter("status", "in", among))

    def _read(self, snapshot: Any) -> Document:
        return Document(
            id=snapshot.id,
            path=f"{self._client.project}/{self._client._database}/{snapshot.reference.path}",
            data=snapshot.to_dict(),
            created_at=snapshot.create_time,
            updated_at=snapshot.update_time,
        )

    # Writing. A change is read, decided and committed on the condition that nobody wrote meanwhile.
    # Unlike a transaction with locks, a bridge that dies in the middle of one blocks nobody.

    def claim(self, document_id: str) -> tuple[Document, DocumentClaim] | None:
        """Make it ours, when it waits or its holder is dead. None: it is neither."""

        def decide(document: Document) -> Fields | None:
            if document.status != DocumentStatus.PENDING and not self._may_take_over(document):
                return None
            claim = documents.next_claim(document, self.holder)
            return documents.claim_fields(document, claim) if claim is not None else None

        document = self._change(document_id, decide)
        if document is None:
            return None
        claim = documents.next_claim(document, self.holder)
        assert claim is not None
        return document, claim

    def _may_take_over(self, document: Document) -> bool:
        """Looked up anew, for the holder may have begun to live a moment ago."""
        if document.claim is None or document.claim.holder == self.holder:
            return document.claim is not None
        beat = self._bridges.document(document.claim.holder).get(**CALL_OPTIONS)
        return self._is_dead(beat)

    def write(self, document_id: str, claim: DocumentClaim, fields: Fields) -> None:
        """Fenced unless the claim still holds and the status goes forward."""

        def decide(document: Document) -> Fields:
            if document.claim != claim:
                raise Fenced(f"{document_id} is in other hands: {document.claim}")
            if document.status == fields["status"]:
                return {}  # written by us before; only the answer was lost
            if not documents.is_forward(document.status, fields["status"]):
                raise Fenced(f"{document_id} is already {document.status}")
            return fields

        if self._change(document_id, decide) is None:
            raise Fenced(f"{document_id} was deleted")

    def reject(self, document_id: str, fields: Fields) -> bool:
        """End a document that nobody can run. False: it does not wait any more."""

        def decide(document: Document) -> Fields | None:
            return fields if document.status == DocumentStatus.PENDING else None

        return self._change(document_id, decide) is not None

    def _change(
        self, document_id: str, decide: Callable[[Document], Fields | None]
    ) -> Document | None:
        """The document as it was before; None when there is none, or nothing is to be changed.
        Fields that are empty mean that it is as wanted already."""
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
                        prepared = self._prepared(fields)
                        reference.update(prepared, option=unchanged, **CALL_OPTIONS)
                    return document
                except (exceptions.FailedPrecondition, exceptions.Aborted, exceptions.NotFound):
                    continue  # somebody was faster: look again
        raise Unreachable(f"{document_id} is changed by others all the time")

    def _prepared(self, fields: Fields) -> Fields:
        return {
            name: self._server_time if value is SERVER_TIME else value
            for name, value in fields.items()
        }

    # Clearing up after documents that have ended. How far that got is remembered beside them.

    def ended_before(self, keep: timedelta, limit: int) -> list[Document]:
        """Those that ended so long ago, by Firestore's clock, and were not cleared up after."""
        with translate_errors():
            mark = self._tidied.get(**CALL_OPTIONS)
            query = self._documents.where(
                filter=self._filter("completed_at", "<=", mark.read_time - keep)
            )
            if mark.exists:
                since = mark.get("completed_at")
                query = query.where(filter=self._filter("completed_at", ">", since))
            found = query.order_by("completed_at").limit(limit).stream(**CALL_OPTIONS)
            return [self._read(snapshot) for snapshot in found]

    def set_cleanup_mark(self, last: Document) -> None:
        with translate_errors():
            self._tidied.set({"completed_at": last.data["completed_at"]}, **CALL_OPTIONS)

    def remove_result_url(self, document_id: str, version: datetime) -> None:
        """The link leads nowhere any more. Unless somebody changed the document meanwhile."""
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

    # Being alive, by Firestore's clock alone.

    def write_heartbeat(self) -> None:
        with translate_errors():
            self._bridges.document(self.holder).set({"seen_at": self._server_time}, **CALL_OPTIONS)

    def delete_heartbeat(self) -> None:
        """Whoever looks takes over at once what we held."""
        with translate_errors():
            self._bridges.document(self.holder).delete(**CALL_OPTIONS)

    def live_bridges(self) -> frozenset[str]:
        """Holders that gave a sign of life lately. Traces of those long dead are cleared away."""
        with translate_errors():
            found = list(self._bridges.stream(**CALL_OPTIONS))
            for snapshot in found:
                if self._is_dead(snapshot, DELETE_HEARTBEAT_AFTER):
                    snapshot.reference.delete(**CALL_OPTIONS)
        return frozenset(snapshot.id for snapshot in found if not self._is_dead(snapshot))

    def _is_dead(self, beat: Any, after: timedelta | None = None) -> bool:
        return not beat.exists or beat.read_time - beat.update_time > (after or self._dead_after)


class CollectionListener:
    def __init__(self, watch: Any) -> None:
        self._watch = watch

    @property
    def alive(self) -> bool:
        return self._watch.is_active

    def close(self) -> None:
        self._watch.unsubscribe()


@contextmanager
def translate_errors() -> Iterator[None]:
    """Google's errors as ours. BadInput is the document's fault alone; what somebody has to set
    right is PermissionMissing, and what may pass by itself is Unreachable."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    ours = (
        exceptions.PermissionDenied,
        exceptions.Unauthenticated,
        exceptions.FailedPrecondition,  # a database of another mode, an index that is not there
    )
    try:
        yield
    except exceptions.InvalidArgument as error:
        raise BadInput(f"Firestore refuses: {error.message}") from error
    except ours as error:
        raise PermissionMissing(
            f"Firestore refuses: {error.message}; the account needs roles/datastore.user"
        ) from error
    except GoogleAuthError as error:
        raise Unreachable(f"no credentials for Firestore: {error}") from error
    except (exceptions.GoogleAPICallError, exceptions.RetryError) as error:
        raise Unreachable(f"Firestore does not answer: {error.message}") from error
