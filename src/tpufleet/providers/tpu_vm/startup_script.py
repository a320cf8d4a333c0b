"""The startup script of a new host, and the metadata that it reads."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tpufleet.model.topology import Accelerator
from tpufleet.providers.tpu_vm import naming
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

SCRIPT = Path(__file__).with_name("startup.sh")


@cache
def script() -> str:
    """The same for every host: input comes from metadata and is never part of the script."""
    return SCRIPT.read_text()


def metadata(accelerator: Accelerator, settings: TpuVmSettings) -> dict[str, str]:
    values = {
        "startup-script": script(),
        "tpufleet-accelerator": accelerator.name,
        naming.HOSTS: str(accelerator.hosts),
        naming.GUEST_ATTRIBUTES: "TRUE",
        "tpufleet-chips": str(accelerator.chips_per_host),
    }
    optional = {
        naming.BUNDLE: settings.bundle,
        naming.BUNDLE_SHA256: settings.bundle_sha256,
        naming.HTTPS_PROXY: settings.https_proxy,
        naming.NO_PROXY: settings.no_proxy,
        naming.CONTAINERS: "yes" if settings.containers else "",
        naming.FORMAT_DISKS: "yes" if settings.format_disks else "",
    }
    return values | {key: value for key, value in optional.items() if value}
