"""Clears away what documents left that ended long ago: results and code. The documents stay."""

from __future__ import annotations

import logging
from datetime import timedelta

from tpufleet.bridges.firestore.collection import JobCollection
from tpufleet.bridges.firestore.large_results import ResultStore
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.jobs import JobId

log = logging.getLogger("tpufleet.bridge")

MAX_INTERVAL = timedelta(hours=1)
BATCH_SIZE = 200  # documents; the next tidying goes on from there


class ResultCleanup:
    """Several bridges may tidy at once: what is gone already is passed over."""

    def __init__(
        self, collection: JobCollection, results: ResultStore, client: FleetClient, keep: timedelta
    ) -> None:
        self._collection, self._results, self._client = collection, results, client
        self._keep = keep
        self.interval = min(MAX_INTERVAL, keep)

    def run_once(self) -> int:
        """How many documents were cleared up after."""
        found = self._collection.ended_before(self._keep, BATCH_SIZE)
        for document in found:
            if document.claim is not None:
                self._clear(document.claim.job_id)
                if "result_url" in document.data:
                    self._collection.remove_result_url(document.id, document.updated_at)
        if found:
            self._collection.set_cleanup_mark(found[-1])
            log.info("cleared up after %d documents", len(found))
        return len(found)

    def _clear(self, job_id: JobId) -> None:
        self._results.delete(job_id)
        try:
            self._client.delete_job_files(job_id)
        except NotFound:
            return  # a job of another control plane, or of one that was begun anew
        except (Conflict, Forbidden) as error:
            log.warning("%s keeps its files: %s", job_id, error)
