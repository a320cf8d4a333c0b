"""Operator settings for TPUs as Compute Engine instances: images, disks, run time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any

from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.tpu_vm.settings import FLEX_START_LIMITS, GoogleSettings

# Of accelerator images; Google replaces their builds about weekly
# (cloud.google.com/tpu/docs/tpu-os-images).
IMAGE_PROJECT = "projects/ubuntu-os-accelerator-images/global/images/family"
IMAGES = {
    "v5p": f"{IMAGE_PROJECT}/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "v6e": f"{IMAGE_PROJECT}/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "tpu7x": f"{IMAGE_PROJECT}/ubuntu-accel-2404-amd64-tpu-tpu7x",
}
_Image = Annotated[
    str,
    schema.text(
        "image",
        r"(https://(www|compute)\.googleapis\.com/compute/v1/)?projects/[a-z0-9.:-]+/global/images/"
        r"(family/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        example="projects/my-project/global/images/family/tpu",
    ),
]


class ComputeSettings(GoogleSettings, frozen=True, kw_only=True):
    """The section `compute` of a config file. What it leaves out is that of `tpu_vm`."""

    # By generation, instead of Google's.
    images: dict[type_lookup.Generation, _Image] = {}
    disk_gb: Annotated[int, Meta(ge=10, le=65536)] = 100  # boot disk; Google's images have 10
    # Root URL of an emulator; empty: Google's API.
    endpoint: Annotated[
        str, schema.text("URL", r"(http://[^\s/]+:[0-9]{1,5})?", example="http://127.0.0.1:8491")
    ] = ""

    @property
    def emulated(self) -> bool:
        return bool(self.endpoint)

    @property
    def run_duration(self) -> timedelta:
        return self.max_run_duration or FLEX_START_LIMITS[1]

    def check(self) -> Iterator[tuple[str, str]]:
        yield from super().check()
        try:
            if self.reservation:
                compute_reservations.parse(self.reservation)
        except BadInput as error:
            yield "reservation", str(error)

    def image(self, generation: str) -> str:
        return self.images.get(generation, IMAGES.get(generation, ""))


def parse(config: Mapping[str, Any]) -> ComputeSettings:
    """From a config file."""
    return schema.parse(ComputeSettings, config, path="compute")


# What `compute` takes from `tpu_vm`.
SHARED = tuple(each for each in GoogleSettings.__struct_fields__ if each != "reservation")
