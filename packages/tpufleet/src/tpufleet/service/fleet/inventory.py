"""The inventory: every slice, and the room that is left in pools, in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from tpufleet.errors import BadInput, Conflict, not_found
from tpufleet.model import identifiers
from tpufleet.model.fleet.hosts import HostId, host_id
from tpufleet.model.fleet.inventory import (
    ChipCount,
    Inventory,
    InventoryChange,
    InventoryNote,
    InventoryRow,
    InventoryState,
)
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.names import label_error
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.stores.base import Store

MAX_TEXT = 500
_STATES = {
    SliceState.REQUESTED: InventoryState.CREATING,
    SliceState.BOOTING: InventoryState.CREATING,
    SliceState.DOOMED: InventoryState.DRAINING,
    SliceState.RELEASING: InventoryState.RELEASING,
}


def inventory(store: Store, now: datetime) -> Inventory:
    slices = store.slices()
    notes = {note.id: note for note in store.documents(InventoryNote)}
    holders = dict.fromkeys(each.job_id for each in slices if each.job_id is not None)
    jobs = store.find_jobs(list(holders))
    seen = _last_checks(store, slices)
    reserved = _reserved_slices(slices, store.documents(Reservation), now)
    rows = [
        _slice_row(each, jobs, notes.get(each.id), seen.get(each.id), reserved.get(each.id), now)
        for each in slices
    ]
    rows += [row for pool in store.pools() if (row := _room(pool, slices, notes.get(pool.name)))]
    chips: Counter[tuple[str, str]] = Counter()
    for each in slices:
        if each.live:
            chips[each.accelerator, each.zone] += type_lookup.find(each.accelerator).chips
    return Inventory(
        rows=tuple(rows),
        chips=tuple(
            ChipCount(accelerator=kind, zone=zone, chips=count)
            for (kind, zone), count in sorted(chips.items())
        ),
    )


def _last_checks(store: Store, slices: Sequence[TpuSlice]) -> dict[SliceId, datetime]:
    hosts: dict[HostId, SliceId] = {
        host_id(each.id, index): each.id
        for each in slices
        for index in range(type_lookup.find(each.accelerator).hosts)
    }
    latest: dict[SliceId, datetime] = {}
    for host, seen in store.last_heartbeats(list(hosts)).items():
        slice_id = hosts[host]
        latest[slice_id] = max(seen.seen_at, latest.get(slice_id, seen.seen_at))
    return latest


def _reserved_slices(
    slices: Sequence[TpuSlice], reservations: Sequence[Reservation], now: datetime
) -> dict[SliceId, Reservation]:
    """Free slices that active reservations keep, as placement would count them."""
    kept: dict[SliceId, Reservation] = {}
    for reservation in reservations:
        if reservation.active(now):
            free = [
                each
                for each in slices
                if each.pool == reservation.pool
                and each.job_id is None
                and each.state is SliceState.READY
                and each.id not in kept
            ]
            kept.update((each.id, reservation) for each in free[: reservation.slices])
    return kept


def _slice_row(
    each: TpuSlice,
    jobs: Mapping[JobId, Job],
    note: InventoryNote | None,
    seen: datetime | None,
    reservation: Reservation | None,
    now: datetime,
) -> InventoryRow:
    job = jobs.get(each.job_id) if each.job_id is not None else None
    written = note or InventoryNote(id=each.id)
    state = _STATES.get(each.state)
    owner = job.owner if job is not None else None
    since = each.idle_since or each.ready_at or each.requested_at
    if state is None and job is not None:
        state, since = InventoryState.RUNNING, max(since, each.assigned_at or since)
    elif state is None and each.is_reserved(now):
        state, owner = InventoryState.RESERVED_ERROR, each.reserved_for
    elif state is None and reservation is not None:
        state, owner, since = InventoryState.RESERVED, reservation.owner, reservation.starts_at
    return InventoryRow(
        id=each.id,
        alias=written.alias or each.node,
        accelerator=each.accelerator,
        count=1,
        chips=type_lookup.find(each.accelerator).chips,
        provider=each.provider,
        zone=each.zone,
        capacity=each.capacity,
        pool=each.pool,
        state=state or InventoryState.FREE,
        owner=owner,
        job_id=each.job_id,
        job_name=job.spec.name if job is not None else "",
        note=written.note or (reservation.note if reservation is not None else ""),
        belongs_to=written.belongs_to,
        since=since,
        last_check=seen,
        reason=each.reason,
        node=each.node,
    )


def _room(
    pool: Pool, slices: Sequence[TpuSlice], note: InventoryNote | None
) -> InventoryRow | None:
    count = pool.largest - sum(each.pool == pool.name and not each.fenced for each in slices)
    if count <= 0:
        return None
    written = note or InventoryNote(id=pool.name)
    return InventoryRow(
        id=pool.name,
        alias=written.alias,
        accelerator=pool.accelerator,
        count=count,
        chips=count * type_lookup.find(pool.accelerator).chips,
        provider=pool.provider,
        zone=", ".join(pool.zones),
        capacity=pool.capacity[0],
        pool=pool.name,
        state=InventoryState.AVAILABLE,
        owner=None,
        job_id=None,
        job_name="",
        note=written.note,
        belongs_to=written.belongs_to,
        since=None,
        last_check=None,
        reason="created when a job of the pool needs it",
    )


def _exists(store: Store, name: str) -> bool:
    return store.slice(SliceId(name)) is not None or store.pool(name) is not None


def annotate(context: CommandContext, name: str, change: InventoryChange) -> InventoryNote:
    """By anyone who may run jobs: it changes nothing but these texts."""
    store = context.store
    known = {note.id: note for note in store.documents(InventoryNote)}
    key = name
    if not _exists(store, key):
        key = next((note.id for note in known.values() if note.alias == name and name), name)
    if not _exists(store, key):
        raise not_found("slice, pool or alias", name, "inventory")
    for field in ("note", "belongs_to"):
        identifiers.check_text(field, getattr(change, field) or "", MAX_TEXT)
    if change.alias and (fault := label_error(change.alias)):
        raise BadInput(f"alias: {fault}")
    taken = [note.id for note in known.values() if note.alias == change.alias and note.id != key]
    if change.alias and change.alias != key and _exists(store, change.alias):
        taken = ["a slice or a pool"]
    if change.alias and taken:
        raise Conflict(f"alias {change.alias} is the name of {taken[0]}; choose another")

    def changed(before: InventoryNote | None) -> InventoryNote | None:
        old = before or InventoryNote(id=key)
        fresh = InventoryNote(
            id=key,
            alias=old.alias if change.alias is None else change.alias,
            note=old.note if change.note is None else change.note,
            belongs_to=old.belongs_to if change.belongs_to is None else change.belongs_to,
        )
        return fresh if fresh.alias or fresh.note or fresh.belongs_to else None

    return store.update_document(InventoryNote, key, changed) or InventoryNote(id=key)
