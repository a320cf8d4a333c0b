"""Pagination, accelerator types and runtime versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet.model import topology
from tpufleet.testbed.cloud_tpu import api_errors
from tpufleet.testbed.cloud_tpu.api_errors import ApiError, Code

MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100


def paginate(items: Sequence[Any], request: Any) -> tuple[Sequence[Any], str]:
    token = request.page_token
    if token and not token.isdecimal():
        raise ApiError(Code.INVALID_ARGUMENT, "The page token is not valid.")
    begin = int(token or 0)
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    end = begin + size
    return items[begin:end], str(end) if end < len(items) else ""


def accelerator_types(parent: str) -> list[cloud_tpu.AcceleratorType]:
    return [
        cloud_tpu.AcceleratorType(name=f"{parent}/acceleratorTypes/{name}", type_=name)
        for name, kind in topology.all_types().items()
        if kind.runtime
    ]


def runtime_versions(parent: str) -> list[cloud_tpu.RuntimeVersion]:
    versions = {kind.runtime for kind in topology.all_types().values() if kind.runtime}
    return [
        cloud_tpu.RuntimeVersion(name=f"{parent}/runtimeVersions/{version}", version=version)
        for version in sorted(versions)
    ]


def find_by_name(name: str, items: Sequence[Any]) -> Any:
    for item in items:
        if item.name == name:
            return item
    raise api_errors.api_error("not-found", target=name)
