"""Reports that the agent connects or cannot, where that does not need the server: guest
attributes of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tpufleet.agent import threads
from tpufleet.errors import FleetError, UntrustedCertificate, unwritable
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage

if TYPE_CHECKING:
    from tpufleet.agent.metadata import MetadataClient

# Compute Engine limits writes and reads to 10 a minute for each VM; startup.sh writes some too.
MIN_INTERVAL_SECONDS = 20.0


class BootstrapReporter:
    """Writes each change, a message of the same stage at most every 20 s. Failures to write are
    logged: a report is for people and must not stop an agent."""

    def __init__(
        self,
        metadata: MetadataClient | None,
        host: int,
        monotonic: Callable[[], float] = time.monotonic,
        slice_id: str = "",
    ) -> None:
        self._metadata = metadata
        self._host = host
        self._slice_id = slice_id
        self._monotonic = monotonic
        self._last: BootstrapReport | None = None
        self._written_at = 0.0

    def connecting(self, error: FleetError) -> None:
        untrusted = isinstance(error, UntrustedCertificate)
        self._write(BootstrapStage.CONNECTING, str(error), untrusted=untrusted)

    def connected(self) -> None:
        self._write(BootstrapStage.CONNECTED, "")

    def failed(self, stage: BootstrapStage, message: str) -> None:
        self._write(stage, message, failed=True)

    def _write(
        self,
        stage: BootstrapStage,
        message: str,
        *,
        failed: bool = False,
        untrusted: bool = False,
    ) -> None:
        if self._metadata is None:
            return
        message = message[: bootstrap.MAX_MESSAGE_LENGTH]
        report = BootstrapReport(
            host=self._host,
            stage=stage,
            failed=failed,
            message=message,
            untrusted=untrusted,
            slice_id=self._slice_id,
        )
        now, last = self._monotonic(), self._last
        same_stage = last is not None and (last.stage, last.failed) == (stage, failed)
        if report == last or (same_stage and now - self._written_at < MIN_INTERVAL_SECONDS):
            return
        self._last, self._written_at = report, now
        try:
            self._metadata.put_guest_attribute(
                bootstrap.GUEST_NAMESPACE, bootstrap.GUEST_KEY, bootstrap.to_json(report)
            )
        except OSError as error:
            threads.log(str(unwritable("guest attributes", error)))


def from_environ(environ: Mapping[str, str]) -> BootstrapReporter:
    """Reports nothing on a host without a metadata server."""
    url, host = environ.get("TPUFLEET_METADATA", ""), environ.get("TPUFLEET_HOST_INDEX", "")
    if not url:
        return BootstrapReporter(None, 0)
    from tpufleet.agent.metadata import MetadataClient  # only cloud machines have such a server

    index = int(host) if host.isdecimal() else 0
    return BootstrapReporter(MetadataClient(url), index, slice_id=environ.get("TPUFLEET_SLICE", ""))
