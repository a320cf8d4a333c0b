"""The edge to the fleet: a request as a job, and what the job handed over."""

from __future__ import annotations

import io
import json
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet.bridges.firestore import outcomes
from tpufleet.bridges.firestore.documents import CodeRequest
from tpufleet.bridges.firestore.outcomes import CodeOutcome
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, NotFound
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.attempts import Attempt
from tpufleet.model.jobs import ENDED_STATES, JobId

PROGRAM_FILES = ("supervise.py", "places.py", "inside.py")
# The supervisor keeps the time of the code. This is for one that cannot: the code may have
# stopped it. It leaves room for devices to come up and for one attempt that was preempted.
TIMEOUT_FACTOR = 2
TIMEOUT_MARGIN_SECONDS = 900
NO_TAG = re.compile(r"[^A-Za-z0-9_.=:/-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTemplate:
    """What every document of a collection is run on."""

    accelerator: str
    program_dir: Path  # folder of the program that runs submitted code
    pool: str | None = None
    python: str = "python3"
    user: str = "auto"  # who runs the code on hosts where agents are root
    retries: int = 3  # after faults of the machine; code that fails is never run again
    priority: int = 0
    capacity: tuple[str, ...] = ()


class FleetJobs:
    """Safe in several threads."""

    def __init__(self, client: FleetClient, offer: JobTemplate) -> None:
        self._client = client
        self._offer = offer

    def submit(self, job_id: JobId, document_id: str, request: CodeRequest) -> JobRow:
        """The job of this id, made if it is not there."""
        known = self.row(job_id)
        if known is not None:
            return known  # perhaps from another version of us: what runs is right
        new = NewJob(
            id=job_id,
            spec=job_spec(self._offer, job_id, document_id, request),
            snapshot=self._upload(request),
        )
        try:
            return self._client.submit([new])[0]
        except Conflict:
            known = self.row(job_id)
            if known is None:
                raise
            return known

    def row(self, job_id: JobId) -> JobRow | None:
        try:
            return self._client.job(job_id).row
        except NotFound:
            return None

    def first_attempt(self, job_id: JobId) -> Attempt | None:
        attempts = self._client.job(job_id).attempts
        return next((attempt for attempt in attempts if attempt.running_at), None)

    def outcome(self, row: JobRow) -> CodeOutcome | None:
        """None while the job may still come to one."""
        try:
            return outcomes.parse_result(self._client.result(row.id))
        except NotFound:
            return outcomes.outcome_of_job(row) if row.state in ENDED_STATES else None

    def cancel(self, job_id: JobId) -> None:
        try:
            self._client.cancel(job_id)
        except (Conflict, NotFound):
            return  # it has ended by itself

    def link(self, job_id: JobId, what: str) -> str:
        return f"{self._client.url}/api/v1/jobs/{job_id}/{what}"

    def _upload(self, request: CodeRequest) -> str:
        with tempfile.TemporaryDirectory(prefix="tpufleet-bridge-") as folder:
            for name in PROGRAM_FILES:
                Path(folder, name).write_bytes((self._offer.program_dir / name).read_bytes())
            # By the key, supervisors know outcomes that they settled from forged ones.
            written = {**_plain(request), "key": secrets.token_hex(16)}
            Path(folder, "request.json").write_text(json.dumps(written))
            scanned = snapshots.scan(folder)
            packed = io.BytesIO()
            snapshots.pack(scanned, packed)
            self._client.put_snapshot(scanned.digest, packed.getvalue())
        return scanned.digest


def job_spec(
    template: JobTemplate, job_id: JobId, document_id: str, request: CodeRequest
) -> dict[str, Any]:
    """As in a job file."""
    backstop = TIMEOUT_FACTOR * request.timeout + TIMEOUT_MARGIN_SECONDS
    document = NO_TAG.sub("-", document_id).lstrip("_.=:/-") or "document"
    written = {
        "name": f"tpu-job-{abs(request.challenge_number)}"[:30] + f"-{job_id[3:9]}",
        "command": [template.python, "supervise.py", "--user", template.user, "request.json"],
        "accelerator": template.accelerator,
        "pool": template.pool,
        "priority": template.priority,
        "capacity": list(template.capacity),
        "timeout": f"{int(backstop)}s",
        "grace": "5s",
        "rule": "pre",
        "retries": {"failure": template.retries, "infrastructure": max(20, template.retries)},
        "crash_loop": template.retries + 1 + max(20, template.retries),
        "tags": ["firestore", f"challenge={request.challenge_number}", f"job-id={document}"[:63]],
    }
    return {name: value for name, value in written.items() if value not in (None, [])}


def _plain(request: CodeRequest) -> dict[str, Any]:
    return {
        "code": request.code,
        "challenge_number": request.challenge_number,
        "timeout": request.timeout,
    }
