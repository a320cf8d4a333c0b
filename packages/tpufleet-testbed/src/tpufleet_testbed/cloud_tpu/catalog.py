"""Pagination, accelerator types and runtime versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.api_errors import Code
from tpufleet_testbed.servers import ApiError

ConfigType: Any = cloud_tpu.AcceleratorConfig.Type  # proto-plus enums are opaque to type checkers
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
# Of cloud.google.com/tpu/docs/runtimes: for JAX and PyTorch, and TensorFlow's
# `tpu-vm-tf-x.y.z[-pod][-pjrt]`.
RUNTIME_VERSIONS = (
    "v2-alpha-tpuv6e", "v2-alpha-tpuv5", "v2-alpha-tpuv5-lite", "v2-tpuv5-litepod",
    "tpu-ubuntu2204-base", "tpu-vm-base", "tpu-vm-v4-base", "tpu-vm-v4-pt-2.0",
    *(
        f"tpu-vm-tf-{version}{hosts}-pjrt"
        for version in ("2.16.1", "2.17.0", "2.18.0")
        for hosts in ("", "-pod")
    ),
)  # fmt: skip
CONFIG_TYPES = {
    "v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E",
}  # fmt: skip


def paginate(items: Sequence[Any], request: Any) -> tuple[Sequence[Any], str]:
    token = request.page_token
    if token and not token.isdecimal():
        raise ApiError(Code.INVALID_ARGUMENT, "The page token is not valid.")
    if request.page_size < 0:
        raise ApiError(Code.INVALID_ARGUMENT, "The page size is negative.")
    begin = int(token or 0)
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    end = begin + size
    return items[begin:end], str(end) if end < len(items) else ""


def accelerator_types(parent: str) -> list[cloud_tpu.AcceleratorType]:
    zone = parent.rpartition("/")[2]
    return [
        cloud_tpu.AcceleratorType(
            name=f"{parent}/acceleratorTypes/{name}",
            type_=name,
            accelerator_configs=[
                cloud_tpu.AcceleratorConfig(
                    type_=ConfigType[CONFIG_TYPES[kind.generation]],
                    topology=kind.topology,
                )
            ],
        )
        for name, kind in type_lookup.all_types().items()
        if kind.runtime and tpu_zones.is_offered(name, zone)
    ]


def runtime_versions(parent: str) -> list[cloud_tpu.RuntimeVersion]:
    return [
        cloud_tpu.RuntimeVersion(name=f"{parent}/runtimeVersions/{version}", version=version)
        for version in sorted(RUNTIME_VERSIONS)
    ]


def find_by_name(name: str, items: Sequence[Any]) -> Any:
    for item in items:
        if item.name == name:
            return item
    raise api_errors.api_error("not-found", target=name)
