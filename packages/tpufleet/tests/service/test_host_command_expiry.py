"""Host commands that an earlier release stored with a timeout that no date can hold."""

from __future__ import annotations

from datetime import timedelta

from tests.contract.store_builders import tpu_slice
from tpufleet.clocks import ManualClock
from tpufleet.model.fleet.host_commands import HostCommand, HostCommandKind, SentHostCommand
from tpufleet.service.hosts.host_commands import HostCommandQueue
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore


def test_one_endless_command_does_not_stop_the_others():
    store, now = MemoryStore(), ManualClock().now()
    store.commit(ChangeSet(slices=[tpu_slice("s1")]))
    for command_id, timeout in (("endless", timedelta.max), ("short", timedelta(seconds=1))):
        command = HostCommand(
            id=command_id, kind=HostCommandKind.COMMAND, command=("true",), timeout=timeout
        )
        store.put_host_command(
            SentHostCommand(host_command=command, slice_id="s1", hosts=("s1/0",), sent_at=now)
        )
    queue = HostCommandQueue(store)
    queue.refresh(now)
    assert [command.id for command in queue.pending_for("s1/0")] == ["endless", "short"]
    queue.refresh(now + timedelta(hours=1))
    assert [command.id for command in queue.pending_for("s1/0")] == ["endless"]
