"""Deletes results, logs and code of documents that ended long ago. The documents stay."""

from __future__ import annotations

import logging
from datetime import timedelta

from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.api_types import PurgeRequest
from tpufleet.model.job.jobs import JobId
from tpufleet_firestore.bridge.collection import JobCollection
from tpufleet_firestore.bridge.large_results import ResultStore

log = logging.getLogger("tpufleet.bridge")

MAX_INTERVAL = timedelta(hours=1)
BATCH_SIZE = 200  # documents; the next batch continues after the last


class ResultCleanup:
    """Several bridges may run it at once: what is already deleted is skipped."""

    def __init__(
        self,
        collection: JobCollection,
        results: ResultStore,
        client: FleetClient,
        retention: timedelta,
    ) -> None:
        self._collection, self._results, self._client = collection, results, client
        self._retention = retention
        self.interval = min(MAX_INTERVAL, retention)

    def run_once(self) -> int:
        """Clean up one batch. Returns its number of documents."""
        batch = self._collection.ended_before(self._retention, BATCH_SIZE)
        for document in batch:
            if document.claim is not None:
                self._delete_files(document.claim.job_id)
                if "result_url" in document.data:
                    self._collection.remove_result_url(document.id, document.updated_at)
        if batch:
            self._collection.set_cleanup_mark(batch[-1])
        return len(batch)

    def _delete_files(self, job_id: JobId) -> None:
        self._results.delete(job_id)
        try:
            self._client.purge(PurgeRequest(jobs=(job_id,)))
        except NotFound:
            return  # a job of another server, or of one that was reset
        except (Conflict, Forbidden) as error:
            log.warning("cannot delete the files of %s: %s", job_id, error)
