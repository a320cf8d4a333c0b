"""The startup scripts of TPU hosts and of a server VM, and the metadata that hosts read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.tpu_vm import naming
from tpufleet.providers.tpu_vm.settings import GoogleSettings

FOLDER = Path(__file__).parent


@cache
def script() -> str:
    """The same for every host: input comes from metadata and is never part of the script."""
    return _join("install_bundle.sh", "startup.sh")


@cache
def server_script() -> str:
    """Of a VM that runs the server."""
    return _join("install_bundle.sh", "server.sh")


def _join(*names: str) -> str:
    return "\n".join((FOLDER / name).read_text() for name in names)


def metadata(accelerator: Accelerator, settings: GoogleSettings) -> dict[str, str]:
    values = {
        "startup-script": script(),
        naming.ACCELERATOR: accelerator.name,
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
