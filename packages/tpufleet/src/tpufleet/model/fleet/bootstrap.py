"""Bootstrap reports: how far a host came before its agent connected, written where the control
plane's own API is not needed (guest attributes of a TPU VM)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tpufleet.errors import BadInput
from tpufleet.model.values import encoding

# Guest attributes are stored by namespace and key.
GUEST_NAMESPACE, GUEST_KEY, CA_KEY = "tpufleet", "bootstrap", "ca"
MAX_MESSAGE_LENGTH = 1000


class BootstrapStage(StrEnum):
    """In order. Written by startup.sh up to STARTING_AGENT, then by the agent."""

    STARTED = "started"
    MOUNTING_DISKS = "mounting disks"
    WAITING_FOR_CHIPS = "waiting for chips"
    DOWNLOADING = "downloading tpufleet"
    INSTALLING = "installing tpufleet"
    CHECKING_CHIPS = "checking chips"
    STARTING_AGENT = "starting the agent"
    STARTING_SERVER = "starting the server"  # on the VM of `tpu deploy server`
    CONNECTING = "connecting to the server"
    CONNECTED = "connected"


@dataclass(frozen=True, kw_only=True, slots=True)
class BootstrapReport:
    host: int
    stage: BootstrapStage
    failed: bool = False  # final: nothing on the host tries again
    message: str = ""  # the error, if any
    untrusted: bool = False  # the error: the host rejects the certificate of the server
    # Of an adopted node, which keeps reports of former adoptions; or the deployment of a server.
    slice_id: str = ""

    @property
    def text(self) -> str:
        what = f"{self.stage} failed" if self.failed else str(self.stage)
        return f"host {self.host}: {what}" + (f": {self.message}" if self.message else "")


def parse_report(text: str) -> BootstrapReport | None:
    """None if it is not a report: any process on a host can write guest attributes."""
    try:
        report = encoding.from_json(text, BootstrapReport)
    except BadInput:
        return None
    return replace(report, message=" ".join(report.message.split())[:MAX_MESSAGE_LENGTH])


def to_json(report: BootstrapReport) -> str:
    return encoding.to_json(report).decode()
