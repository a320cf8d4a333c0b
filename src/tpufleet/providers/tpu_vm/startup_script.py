"""What a new machine is told: a startup script without any input in it, and metadata to read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tpufleet.model.topology import Accelerator
from tpufleet.providers.tpu_vm import naming
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

SCRIPT = Path(__file__).with_name("startup.sh")


@cache
def script() -> str:
    """The same for everybody: whatever differs is read from the metadata, never from the text."""
    return SCRIPT.read_text()


def metadata(accelerator: Accelerator, settings: TpuVmSettings) -> dict[str, str]:
    found = {
        "startup-script": script(),
        "tpufleet-accelerator": accelerator.name,
        "tpufleet-hosts": str(accelerator.hosts),
        "tpufleet-chips": str(accelerator.chips_per_host),
    }
    if settings.wheel:
        found |= {naming.WHEEL: settings.wheel, naming.WHEEL_SHA256: settings.wheel_sha256}
    return found
