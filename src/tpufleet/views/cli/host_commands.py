"""Sending a command to the agents of a slice and waiting for the results."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from tpufleet.errors import NotFound
from tpufleet.model.host_commands import HostCommandReport, HostCommandRequest
from tpufleet.views.cli import output

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.model.api_types import SliceRow

POLL_SECONDS = 0.3
# An agent gets the command with its next heartbeat and reports with the one after.
HEARTBEAT_ALLOWANCE = timedelta(seconds=20)
# After this long, the user sees which hosts have not answered.
STATUS_AFTER_SECONDS = 5.0


def find_slice(client: FleetClient, slice_id: str) -> SliceRow:
    for row in client.slices(include_released=True):
        if row.id == slice_id:
            return row
    raise NotFound(f"no slice {slice_id!r}; `tpu slices` lists them")


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


def unanswered_hosts(report: HostCommandReport) -> list[str]:
    return sorted({*report.hosts} - {result.host_id for result in report.results})
