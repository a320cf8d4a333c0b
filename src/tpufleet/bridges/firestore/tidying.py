"""Clears away what documents left that ended long ago: results and code. The documents stay."""

from __future__ import annotations

import logging
from datetime import timedelta

from tpufleet.bridges.firestore.collection import Collection
from tpufleet.bridges.firestore.large_results import Results
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.jobs import JobId

log = logging.getLogger("tpufleet.bridge")

EVERY = timedelta(hours=1)
AT_A_TIME = 200  # documents; the next tidying goes on from there


class Tidier:
    """Several bridges may tidy at once: what is gone already is passed over."""

    def __init__(
        self, collection: Collection, results: Results, client: FleetClient, keep: timedelta
    ) -> None:
        self._collection, self._results, self._client = collection, results, client
        self._keep = keep
        self.every = min(EVERY, keep)

    def tidy(self) -> int:
        """How many documents were cleared up after."""
        found = self._collection.ended_before(self._keep, AT_A_TIME)
        for document in found:
            if document.claim is not None:
                self._clear(document.claim.job)
                if "result_url" in document.data:
                    self._collection.forget_result(document.id, document.version)
        if found:
            self._collection.tidied_until(found[-1])
            log.info("cleared up after %d documents", len(found))
        return len(found)

    def _clear(self, job_id: JobId) -> None:
        self._results.drop(job_id)
        try:
            self._client.drop_files(job_id)
        except NotFound:
            return  # a job of another control plane, or of one that was begun anew
        except (Conflict, Forbidden) as error:
            log.warning("%s keeps its files: %s", job_id, error)
