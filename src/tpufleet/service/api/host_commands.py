"""The routes of people who send errands to hosts. Admins only: a host may be in anybody's use."""

from __future__ import annotations

from tpufleet.errors import BadInput, NotFound
from tpufleet.model import topology
from tpufleet.model.api_types import Acknowledgement
from tpufleet.model.host_commands import HostCommandKind, HostCommandReport, HostCommandRequest
from tpufleet.model.hosts import host_id
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.service.routing import ApiCall

MAX_ARGUMENTS = 1000


def send_host_command(call: ApiCall) -> Acknowledgement:
    order, slice_id = call.parse_body(HostCommandRequest), SliceId(call.path_param("id"))
    if not 1 <= len(order.id) <= 64 or not order.id.isalnum():
        raise BadInput("id: 1 to 64 letters and digits are needed")
    if order.kind is HostCommandKind.COMMAND and not order.command:
        raise BadInput("command: missing; say what to run")
    if len(order.command) > MAX_ARGUMENTS:
        raise BadInput(f"command: more than {MAX_ARGUMENTS} words")
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise NotFound(f"no slice is called {slice_id!r}; `tpu slices` lists them")
    count = topology.find(tpu_slice.accelerator).hosts
    if order.host is not None and not 0 <= order.host < count:
        raise BadInput(f"host: slice {slice_id} has hosts 0 to {count - 1}")
    indexes = range(count) if order.host is None else (order.host,)
    hosts = tuple(host_id(slice_id, index) for index in indexes)
    call.components.host_commands.send(order, slice_id, hosts, call.now)
    return Acknowledgement()


def get_host_command(call: ApiCall) -> HostCommandReport:
    return call.components.host_commands.report(
        call.path_param("errand"), call.path_param("id"), call.now
    )
