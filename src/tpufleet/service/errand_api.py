"""The routes of people who send errands to hosts. Admins only: a host may be in anybody's use."""

from __future__ import annotations

from tpufleet.errors import BadInput, NotFound
from tpufleet.model import topology
from tpufleet.model.errands import ErrandKind, ErrandOrder, ErrandReport
from tpufleet.model.hosts import host_id
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.model.views import Done
from tpufleet.service.routes import Call

MOST_WORDS = 1000


def send_errand(call: Call) -> Done:
    order, slice_id = call.json(ErrandOrder), SliceId(call.path("id"))
    if not 1 <= len(order.id) <= 64 or not order.id.isalnum():
        raise BadInput("id: 1 to 64 letters and digits are needed")
    if order.kind is ErrandKind.COMMAND and not order.command:
        raise BadInput("command: missing; say what to run")
    if len(order.command) > MOST_WORDS:
        raise BadInput(f"command: more than {MOST_WORDS} words")
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise NotFound(f"no slice is called {slice_id!r}; `tpu slices` lists them")
    count = topology.find(tpu_slice.accelerator).hosts
    if order.host is not None and not 0 <= order.host < count:
        raise BadInput(f"host: slice {slice_id} has hosts 0 to {count - 1}")
    indexes = range(count) if order.host is None else (order.host,)
    hosts = tuple(host_id(slice_id, index) for index in indexes)
    call.parts.errands.send(order, slice_id, hosts, call.now)
    return Done()


def show_errand(call: Call) -> ErrandReport:
    return call.parts.errands.report(call.path("errand"), call.path("id"), call.now)
