"""Sending a command to the agents of a slice and waiting for the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from tpufleet.errors import BadInput, FleetError, NotFound
from tpufleet.model.fleet.host_commands import HostCommandReport, HostCommandRequest
from tpufleet.views.cli import output
from tpufleet.views.text import duration

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.model.api_types import SliceRow

POLL_SECONDS = 0.3
# After this long, the user sees which hosts have not answered.
STATUS_AFTER_SECONDS = 5.0


def find_slices(client: FleetClient, ref: str) -> tuple[SliceRow, ...]:
    """The slice of this name, or the slices that a job holds, by any reference to the job."""
    named = client.find_slice(ref) or next(
        (row for row in client.slices() if row.node == ref), None
    )
    if named is not None:
        return (named,)
    try:
        detail = client.job(ref)
    except NotFound as error:
        raise NotFound(
            f"no slice or job {ref!r}\n  next: `tpu inventory slices` or `tpu jobs` lists them"
        ) from error
    if not detail.slices:
        job = detail.job
        raise NotFound(
            f"job {job.spec.name} ({job.id}) has no hosts; its state is {job.state}\n"
            f"  next: tpu why {job.id}"
        )
    return detail.slices


def find_slice(client: FleetClient, ref: str) -> SliceRow:
    """For a command that takes one slice."""
    rows = find_slices(client, ref)
    if len(rows) > 1:
        names = ", ".join(row.id for row in rows)
        raise BadInput(f"{ref} runs on {len(rows)} slices; name one of {names}")
    return rows[0]


def wait_for_results(
    client: FleetClient,
    slice_id: str,
    request: HostCommandRequest,
    within: timedelta,
    expected: int | None = None,
) -> HostCommandReport:
    """Until all hosts (or `expected` of them) have answered, or time is up."""
    client.send_host_command(slice_id, request)
    start, announced = time.monotonic(), False
    while True:
        report = client.host_command(slice_id, request.id)
        # Unresponsive hosts are not waited for once the others have answered.
        complete = report.done or (expected is not None and len(report.results) >= expected)
        waited = time.monotonic() - start
        if complete or waited > within.total_seconds():
            return report
        if waited > STATUS_AFTER_SECONDS and not announced:
            output.print_status(f"waiting for {', '.join(unanswered_hosts(report))}")
            announced = True
        time.sleep(POLL_SECONDS)


def no_answer(hosts: Sequence[str], within: timedelta, slice_id: str) -> FleetError:
    return FleetError(
        f"no answer from {', '.join(hosts)} within {duration(within)}\n"
        f"  next: tpu doctor {slice_id}"
    )


def unanswered_hosts(report: HostCommandReport) -> list[str]:
    return sorted({*report.hosts} - {result.host_id for result in report.results})
