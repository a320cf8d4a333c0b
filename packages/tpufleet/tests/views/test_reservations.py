"""`tpu reserve` and `tpu inventory`, as users type them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet.errors import BadInput
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.stores.base import ChangeSet
from tpufleet.views.cli import output
from tpufleet.views.cli.slices.inventory import generation_pattern
from tpufleet.views.cli.slices.reservations import start_time

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def lab(world: ServiceHarness) -> None:
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2)
    world.store.commit(ChangeSet(pools=[pool]))


def test_reserve_extend_and_release(tpu: Tpu, lab):
    made = tpu.json("reserve", "lab", "--for", "2h", "--note", "demo")
    assert (made["slices"], made["owner"], made["note"]) == (2, "mel", "demo")
    extended = tpu.json("reserve", "extend", made["id"])
    length = datetime.fromisoformat(extended["ends_at"]) - datetime.fromisoformat(made["ends_at"])
    assert length == timedelta(minutes=30)
    assert "demo" in tpu.ok("reserve", "list")
    assert "released" in tpu.ok("reserve", "end", made["id"][:5])
    assert f"{made['id']} has already ended, at " in tpu.ok("reserve", "end", made["id"])
    assert tpu.json("reserve", "list")["reservations"] == []
    assert "ended by mel" in tpu.ok("reserve", "list", "--all")


def test_two_reservations_cannot_have_the_same_slices(
    world: ServiceHarness, tpu: Tpu, admin: Tpu, lab
):
    made = tpu.json("reserve", "lab", "--slices", "1")
    admin.ok("reserve", "lab", "--slices", "1")
    refused = admin("reserve", "lab", "--slices", "1", "--for", "10m")
    assert refused.exit_code != 0 and "has 0 of 2 slices left" in refused.stderr
    later = world.clock.now() + timedelta(hours=2)
    admin.ok("reserve", "lab", "--from", later.isoformat())  # after both
    assert "reason: missing" in admin("reserve", "end", made["id"]).stderr
    known = admin.json("reserve", "list")["reservations"]
    hers = next(each["id"] for each in known if each["owner"] == "ada")
    assert "belongs to ada" in tpu("reserve", "end", hers).stderr
    admin.ok("reserve", "end", made["id"], "--reason", "deadline")
    assert "ended by ada: deadline" in tpu.ok("reserve", "list", "--all")
    assert "deadline" in tpu.ok("events")


def test_deleting_a_pool_says_which_reservations_end(
    tpu: Tpu, admin: Tpu, lab, monkeypatch: pytest.MonkeyPatch
):
    made = tpu.json("reserve", "lab", "--for", "2h")
    asked: list[str] = []
    monkeypatch.setattr(output, "confirm", lambda question, _: asked.append(question))
    assert admin.ok("pool", "delete", "lab") == "deleted pool lab; ended 1 reservation\n"
    assert asked == ["Delete pool lab and end 1 reservation (of mel)?"]
    assert tpu.json("reserve", "list")["reservations"] == []
    assert made["id"] not in tpu.ok("reserve", "list")
    assert "ended by ada: pool lab was deleted" in tpu.ok("reserve", "list", "--all")


def test_wrong_reservations_say_what_to_write(tpu: Tpu, lab):
    assert "did you mean lab" in tpu("reserve", "lap").stderr
    assert "from 1m to 7d" in tpu("reserve", "lab", "--for", "30d").stderr
    assert "not a time; for example 14:00" in tpu("reserve", "lab", "--from", "soon").stderr
    assert "from 1 to 2, not 3" in tpu("reserve", "lab", "--slices", "3").stderr
    assert "tpu reserve list" in tpu("reserve", "end", "nothing").stderr


@pytest.mark.parametrize(
    ("written", "start"),
    [
        ("14:00", NOON + timedelta(hours=2)),
        ("9:30", NOON + timedelta(hours=21, minutes=30)),  # tomorrow
        ("2h", NOON + timedelta(hours=2)),
        ("2026-03-02 08:00", NOON + timedelta(hours=20)),
        ("25:00", None),
    ],
)
def test_start_times(written, start):
    if start is None:
        with pytest.raises(BadInput):
            start_time(written, NOON)
    else:
        assert start_time(written, NOON) == start


def test_the_inventory_has_slices_room_and_notes(world: ServiceHarness, tpu: Tpu, lab):
    world.submit("job-1", name="train")
    assigned = world.clock.now() + timedelta(minutes=5)
    world.add_slice("s-1", "job-1", pool="lab", assigned_at=assigned)
    world.change_job("job-1", state=JobState.STARTING)
    world.add_slice("s-2", None, accelerator="v4-8", zone="us-central2-b",
                    capacity=Capacity.ON_DEMAND)  # fmt: skip
    tpu.ok(
        "inventory", "set", "s-1", "--alias", "big", "--note", "=cmd|demo", "--belongs-to", "vision"
    )
    rows = {row["id"]: row for row in tpu.json("inventory")["rows"]}
    assert (rows["s-1"]["state"], rows["s-1"]["owner"], rows["s-1"]["job_name"]) == (
        "running", "mel", "train",
    )  # fmt: skip
    assert datetime.fromisoformat(rows["s-1"]["since"]) == assigned, "not when it was created"
    assert rows["s-2"]["state"] == "free"
    assert (rows["lab"]["state"], rows["lab"]["count"]) == ("not created", 1)
    assert "vision" in tpu.ok("inventory") and "chips: 4 v4-8 in us-central2-b" in tpu.ok(
        "inventory"
    )
    tpu.ok("inventory", "set", "big", "--alias", "small")
    csv = tpu.ok("inventory", "--csv").splitlines()
    assert csv[0].startswith("id,alias,") and "s-1,small,v5litepod-16" in csv[1]
    assert "'=cmd|demo" in csv[1]  # not a formula
    tpu.ok("inventory", "set", "s-2", "--alias", "other")
    assert "is the name of s-1" in tpu("inventory", "set", "s-2", "--alias", "small").stderr
    assert "no slice, pool or alias" in tpu("inventory", "set", "s-9", "--note", "x").stderr
    ids = lambda *args: [row["id"] for row in tpu.json("inventory", *args)["rows"]]
    assert ids("v4", "free") == ["s-2"] and ids("v5e", "free") == ["lab"]
    assert ids("on-demand") == ids("us-central2-b") == ["s-2"] and ids("v5+") == ["s-1", "lab"]
    assert ids("small") == ids("s-1") == ["s-1"] and ids("small", "v4") == ["s-1", "s-2"]
    assert "unknown" in tpu("inventory", "smal").stderr


def test_an_alias_does_not_hide_a_slice_or_a_pool(world: ServiceHarness, tpu: Tpu, lab):
    world.add_slice("s-1", None, pool="lab")
    for name, alias in (("lab", "s-1"), ("s-1", "lab")):
        refused = tpu("inventory", "set", name, "--alias", alias)
        assert "is the name of a slice or a pool" in refused.stderr
    tpu.ok("inventory", "set", "lab", "--alias", "s-2")  # a slice of that name comes later
    world.add_slice("s-2", None, pool="lab")
    tpu.ok("inventory", "set", "s-2", "--note", "mine")
    notes = {row["id"]: row["note"] for row in tpu.json("inventory")["rows"]}
    assert notes["s-2"] == "mine" and "mine" not in notes.get("lab", "")


def test_the_inventory_as_csv_has_no_control_characters(world: ServiceHarness, tpu: Tpu, lab):
    tpu.ok("inventory", "set", "lab", "--note", "a\x1b]0;title\x07b", "--belongs-to", "\x9b2J")
    shown = tpu.ok("inventory", "--csv")
    assert "a�]0;title�b" in shown and "\x1b" not in shown and "\x9b" not in shown


def test_a_reserved_free_slice_says_for_whom(world: ServiceHarness, tpu: Tpu, lab):
    world.add_slice("s-1", None, pool="lab")
    tpu.ok("reserve", "lab", "--note", "demo")
    (row, _room) = tpu.json("inventory")["rows"]
    assert (row["state"], row["owner"], row["note"]) == ("reserved", "mel", "demo")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("v4", {"v4-8"}),
        ("v5", {"v5litepod-16", "v5p-8"}),
        ("v5e", {"v5litepod-16"}),
        ("v5p", {"v5p-8"}),
        ("v5e-16", {"v5litepod-16"}),
        ("v5+", {"v5litepod-16", "v5p-8", "v6e-8"}),
        ("v*", {"v4-8", "v5litepod-16", "v5p-8", "v6e-8"}),
    ],
)
def test_types_of_find(written, found):
    known = {"v4-8", "v5litepod-16", "v5p-8", "v6e-8"}
    assert {each for each in known if generation_pattern(written).fullmatch(each)} == found
