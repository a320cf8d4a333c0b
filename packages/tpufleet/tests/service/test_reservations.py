"""Reservations: requests at the same time, and limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.model.api_types import NewReservation
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.policy.scheduling import reservation_limits
from tpufleet.service.fleet import reservations
from tpufleet.stores.base import ChangeSet

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def lab(service: ServiceHarness) -> None:
    put_pool(service)


def put_pool(service: ServiceHarness, **fields) -> None:
    values = {"name": "lab", "provider": "local", "accelerator": "v5litepod-16", "largest": 2}
    service.store.commit(ChangeSet(pools=[Pool(**{**values, **fields})]))


def reserve(service: ServiceHarness, name: str, by: str = "mel", *, after=None, **fields):
    starts_at = None if after is None else service.clock.now() + after
    values = {"pool": "lab", "slices": 1, "duration": HOUR, "starts_at": starts_at}
    return service.client(by).reserve(NewReservation(id=name, **{**values, **fields}))


def test_concurrent_reservations_with_one_token_take_no_slice_twice(service, lab):
    def attempt(number: int) -> bool:
        try:
            reserve(service, f"r{number}")
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(attempt, range(8))) == 2
    assert len(service.store.documents(Reservation)) == 2


def test_a_request_is_repeated_only_by_the_user_who_made_it(service, lab):
    assert reserve(service, "r1") == reserve(service, "r1")
    with pytest.raises(Conflict, match="in use"):
        reserve(service, "r1", by="mo")


def test_a_server_that_was_frozen_beyond_its_lease_reserves_nothing(service, lab, monkeypatch):
    check, others = reservation_limits.refusal, ["r2"]

    def freeze(*arguments):
        while others:
            service.clock.advance(timedelta(minutes=1))
            reserve(service, others.pop(), slices=2)
        return check(*arguments)

    monkeypatch.setattr(reservation_limits, "refusal", freeze)
    monkeypatch.setattr(reservations, "_require_room", lambda *_: None)  # it saw room before
    with pytest.raises(Conflict, match="another reservation is being made"):
        reserve(service, "r1", slices=2)
    assert [each.id for each in service.store.documents(Reservation)] == ["r2"]


def test_a_member_cannot_reserve_a_pool_back_to_back(service, lab):
    reserve(service, "r1", duration=4 * DAY)
    with pytest.raises(Conflict, match="at most 7 of any 14 days"):
        reserve(service, "r2", after=4 * DAY, duration=4 * DAY)
    reserve(service, "r3", after=4 * DAY, duration=3 * DAY)
    with pytest.raises(Conflict, match="at most 7 of any 14 days"):
        service.client("mel").extend_reservation("r3", HOUR)
    service.clock.advance(7 * DAY)  # what has ended counts too
    with pytest.raises(Conflict, match="at most 7 of any 14 days"):
        reserve(service, "r4", duration=DAY)
    reserve(service, "r5", after=7 * DAY, duration=4 * DAY)
    reserve(service, "other-user", by="mo", duration=7 * DAY)


def test_a_member_has_few_reservations_not_far_ahead(service, lab):
    for number in range(10):
        reserve(service, f"r{number}", after=number * HOUR)
    with pytest.raises(Conflict, match="mel has 10 reservations already"):
        reserve(service, "r10", after=20 * HOUR)
    assert reserve(service, "r9").id == "r9"  # sent again
    with pytest.raises(Conflict, match="at most 14 days ahead"):
        reserve(service, "r11", by="mo", after=15 * DAY)


def test_a_time_that_has_passed_cannot_be_reserved(service, lab):
    with pytest.raises(BadInput, match=r"starts_at: .* has passed"):
        reserve(service, "r1", after=-HOUR)
    assert reserve(service, "r2", after=timedelta(seconds=-5)).starts_at == service.clock.now()


def test_a_member_cannot_make_and_release_reservations_without_end(service, lab):
    """All are kept for a while, and each new one is compared with them."""
    for number in range(reservation_limits.MAX_PER_DAY):
        made = reserve(service, f"r-{number}", duration=HOUR)
        service.client("mel").end_reservation(made.id)
    with pytest.raises(Conflict, match="mel has made 30 reservations within a day"):
        reserve(service, "one-more", duration=HOUR)
    service.clock.advance(timedelta(days=1, minutes=1))
    assert reserve(service, "one-more", duration=HOUR)


def test_reservations_honour_the_slices_per_user_of_the_pool(service):
    put_pool(service, largest=4, slices_per_user=2)
    assert reserve(service, "r1", slices=None).slices == 2
    with pytest.raises(Conflict, match=r"may hold 2 .* reserved 3"):
        reserve(service, "r2", slices=1)
    reserve(service, "r3", slices=1, after=2 * HOUR)


def test_admins_reserve_without_these_limits(service):
    put_pool(service, largest=4, slices_per_user=1)
    for number in range(12):
        reserve(service, f"r{number}", by="ada", slices=4, after=number * 2 * DAY, duration=2 * DAY)


def test_a_reservation_larger_than_its_pool_has_become_cannot_be_extended(service, lab):
    reserve(service, "r1", slices=2)
    put_pool(service, largest=1)
    with pytest.raises(Conflict, match="has 1 of 1 slices left"):
        service.client("mel").extend_reservation("r1", HOUR)


def test_the_events_of_a_reservation_are_listed_apart(service, lab):
    reserve(service, "r1", note="demo")
    reserve(service, "r2", by="mo")
    service.client("mel").extend_reservation("r1", HOUR)
    service.client("ada").end_reservation("r1", "maintenance")
    events = service.client("mo").events(reservation="r1").events
    assert [(each.by, each.state) for each in events] == [
        ("mel", "reserved"), ("mel", "reserved"), ("ada", "released"),
    ]  # fmt: skip
    assert events[-1].message == "ada broke the reservation of mel: maintenance"


def _active(service: ServiceHarness) -> list[str]:
    return [each.id for each in service.client("mo").reservations()]


def test_a_deleted_pool_ends_its_reservations_and_a_new_one_of_its_name_has_none(service, lab):
    put_pool(service, name="other")
    reserve(service, "now")
    reserve(service, "later", by="mo", after=DAY)
    reserve(service, "elsewhere", pool="other")
    service.client("ada").delete_pool("lab")
    assert _active(service) == ["elsewhere"]
    put_pool(service)
    assert _active(service) == ["elsewhere"]
    reserve(service, "again", by="ada", slices=2)
    ended = {each.id: each for each in service.client("mo").reservations(ended=True)}
    for name in ("now", "later"):
        assert (ended[name].ended_by, ended[name].end_reason) == ("ada", "pool lab was deleted")
        last = service.client("mo").events(reservation=name).events[-1]
        assert (last.by, last.state) == ("ada", "released")
        assert "has ended: pool lab was deleted" in last.message


def test_a_pool_that_is_not_deleted_keeps_its_reservations(service, lab):
    job = service.submit(by="mel", pool="lab", accelerator="v5e-16")
    reserve(service, "now")
    with pytest.raises(Conflict, match=f"in use by 1 job, such as {job}"):
        service.client("ada").delete_pool("lab")
    assert _active(service) == ["now"]


def test_a_pool_that_is_deleted_during_a_request_is_not_reserved(service, lab, monkeypatch):
    acquire = service.store.acquire_lease

    def deleted_before(*arguments):
        service.store.commit(ChangeSet(deleted_pools=["lab"]))
        return acquire(*arguments)

    monkeypatch.setattr(service.store, "acquire_lease", deleted_before)
    with pytest.raises(NotFound, match="no pool named 'lab'"):
        reserve(service, "late")
    assert _active(service) == []


def test_reservations_of_users_who_are_no_longer_members_end(service):
    put_pool(service, largest=3, members=("mel", "mo"))
    for by, name in (("ada", "r1"), ("mel", "r2"), ("mo", "r3")):
        reserve(service, name, by)
    ada = service.client("ada")
    ada.put_pool(replace(ada.pool("lab"), members=("mo",)))
    assert [each.owner for each in ada.reservations()] == ["ada", "mo"]
    ended = service.store.document(Reservation, "r2")
    assert ended.end_reason == "mel is no longer a member of pool lab"
