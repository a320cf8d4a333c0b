"""Runs requests as jobs of the server, and reads their results."""

from __future__ import annotations

import io
import json
import logging
import re
import secrets
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import ENDED_STATES, JobId
from tpufleet_firestore.bridge import outcomes
from tpufleet_firestore.bridge.documents import CodeRequest
from tpufleet_firestore.bridge.outcomes import CodeOutcome

log = logging.getLogger("tpufleet.bridge")

PROGRAM_FILES = ("supervise.py", "job_context.py", "run_code.py")
# The supervisor enforces the code's timeout. The job's own timeout applies if the code has stopped
# the supervisor, and leaves time for devices to start and for one preempted attempt.
TIMEOUT_FACTOR = 2
TIMEOUT_MARGIN_SECONDS = 900
INVALID_IN_TAG = re.compile(r"[^A-Za-z0-9_.=:/-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTemplate:
    """What every document of a collection runs on."""

    accelerator: str
    program_dir: Path  # with the files of PROGRAM_FILES
    pool: str | None = None
    python: str = "python3"
    user: str = "auto"  # that runs the code on hosts where agents are root
    allow_root: bool = False  # if that user cannot run it
    retries: int = 3  # after machine failures; failed code is never run again
    priority: int = 0
    capacity: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSettings:
    """Of `log_url` and `result_url` in documents."""

    lifetime: timedelta = timedelta(days=7)
    server_url: str | None = None  # at which clients reach the server; None: as the bridge


class FleetJobs:
    """Thread-safe."""

    def __init__(
        self, client: FleetClient, template: JobTemplate, links: LinkSettings | None = None
    ) -> None:
        self._client = client
        self._template = template
        self._links = links or LinkSettings()

    def submit(self, job_id: JobId, document_id: str, request: CodeRequest) -> JobRow:
        """The job with this id, created if it does not exist."""
        existing = self.row(job_id)
        if existing is not None:
            return existing  # possibly submitted by another version of the bridge
        new = NewJob(
            id=job_id,
            spec=job_spec(self._template, job_id, document_id, request),
            snapshot=self._upload(request),
        )
        try:
            return self._client.submit([new])[0]
        except Conflict:
            existing = self.row(job_id)
            if existing is None:
                raise
            return existing

    def row(self, job_id: JobId) -> JobRow | None:
        try:
            return self._client.job(job_id).row
        except NotFound:
            return None

    def first_attempt(self, job_id: JobId) -> Attempt | None:
        attempts = self._client.job(job_id).attempts
        return next((attempt for attempt in attempts if attempt.running_at), None)

    def outcome(self, row: JobRow) -> CodeOutcome | None:
        """None while the job may still produce one."""
        try:
            return outcomes.parse_result(self._client.result(row.id))
        except NotFound:
            return outcomes.outcome_of_job(row) if row.state in ENDED_STATES else None

    def cancel(self, job_id: JobId) -> None:
        try:
            self._client.cancel(job_id)
        except (Conflict, NotFound):
            return  # it has already ended

    def link(self, job_id: JobId, resource: str) -> str:
        """A link that works without a token, because authors of documents have none. One that needs
        a token, if the job is of the user of another bridge or the server is older."""
        try:
            path = self._client.create_link(job_id, resource, self._links.lifetime).path
        except (Forbidden, NotFound) as error:
            log.warning("cannot create a link to the %s of %s: %s", resource, job_id, error)
            path = f"/api/v1/jobs/{job_id}/{resource}"
        return (self._links.server_url or self._client.url).rstrip("/") + path

    def _upload(self, request: CodeRequest) -> str:
        with tempfile.TemporaryDirectory(prefix="tpufleet-bridge-") as folder:
            for name in PROGRAM_FILES:
                Path(folder, name).write_bytes((self._template.program_dir / name).read_bytes())
            # Supervisors sign outcomes with the key, so that the code cannot forge one.
            contents = {**asdict(request), "key": secrets.token_hex(16)}
            Path(folder, "request.json").write_text(json.dumps(contents))
            scanned = snapshots.scan(folder)
            packed = io.BytesIO()
            snapshots.pack(scanned, packed)
            self._client.put_snapshot(scanned.digest, packed.getvalue())
        return scanned.digest


def job_spec(
    template: JobTemplate, job_id: JobId, document_id: str, request: CodeRequest
) -> dict[str, Any]:
    """In the format of a job file."""
    timeout = TIMEOUT_FACTOR * request.timeout + TIMEOUT_MARGIN_SECONDS
    document = INVALID_IN_TAG.sub("-", document_id).lstrip("_.=:/-") or "document"
    spec = {
        "name": f"tpu-job-{abs(request.challenge_number)}"[:30] + f"-{job_id[3:9]}",
        "command": [
            *(template.python, "supervise.py", "--user", template.user),
            *(["--allow-root"] if template.allow_root else []),
            "request.json",
        ],
        "accelerator": template.accelerator,
        "pool": template.pool,
        "priority": template.priority,
        "capacity": list(template.capacity),
        "timeout": f"{int(timeout)}s",
        "grace": "5s",
        "rule": "pre",
        "retries": {"failure": template.retries, "infrastructure": max(20, template.retries)},
        "crash_loop": template.retries + 1 + max(20, template.retries),
        "tags": ["firestore", f"challenge={request.challenge_number}", f"job-id={document}"[:63]],
    }
    return {name: value for name, value in spec.items() if value not in (None, [])}
