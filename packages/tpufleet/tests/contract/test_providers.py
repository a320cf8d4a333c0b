"""The contract of all providers. Each has a world that can be created, reopened after a crash, and
moved forward in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fake_provider import FakeProvider
from tests.polling import Patience
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadRequest, NoCapacity
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.local import processes
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.providers.local.stock import Stock, StockLimit

# Of four hosts and of one, in a zone where every provider has both.
ZONE, SLICE, SINGLE_HOST = "us-central1-a", "v5p-32", "v5p-8"


class LocalWorld:
    """Simulated slices whose agents only sleep."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "local"
        self.clock = ManualClock()
        self.stock = Stock()
        self.provider = self._open()

    def _open(self) -> LocalProvider:
        return LocalProvider(self.root, clock=self.clock, agent=("sleep", "1000"), stock=self.stock)

    def limit(self, slices: int, accelerator: str = SLICE) -> None:
        self.stock = Stock(limits=(StockLimit(slices=slices, zone=ZONE),))
        self.provider = self._open()

    def reopen(self) -> None:
        """Restart the server after a crash."""
        self.provider = self._open()

    def pass_time(self, by: timedelta) -> None:
        self.clock.advance(by)
        self.provider.advance()

    def close(self) -> None:
        self.provider.release_all()
        self.provider.close()
        assert processes.leftovers(self.root) == []


class FakeWorld:
    """The in-memory cloud, which a crash of the server does not affect."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.provider = FakeProvider(self.clock, deletion=timedelta(seconds=2))

    def limit(self, slices: int, accelerator: str = SLICE) -> None:
        self.provider.stock[ZONE, accelerator] = slices

    def reopen(self) -> None:
        pass

    def pass_time(self, by: timedelta) -> None:
        self.clock.advance(by)

    def close(self) -> None:
        self.provider.close()


class TpuVmWorld:
    """TPU VMs of an emulated cloud, through Google's client."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")
        from tests.providers.tpu_vm.emulated_tpus import EmulatedTpus

        self._world = EmulatedTpus(folder, suspend_whole_gang=False)
        self.provider = self._world.provider

    def limit(self, slices: int, accelerator: str = SLICE) -> None:
        self._world.limit(slices)

    def reopen(self) -> None:
        self.provider = self._world.reopen()

    def pass_time(self, by: timedelta) -> None:
        self._world.clock.advance(by)

    def close(self) -> None:
        self._world.close()


class ComputeWorld:
    """Compute Engine instances and groups of an emulated cloud."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")
        from tests.providers.compute.emulated_compute import EmulatedCompute

        self._world = EmulatedCompute(folder)
        self.provider = self._world.provider

    def limit(self, slices: int, accelerator: str = SLICE) -> None:
        self._world.limit(slices * find(accelerator).hosts, ZONE)

    def reopen(self) -> None:
        self.provider = self._world.reopen()

    def pass_time(self, by: timedelta) -> None:
        self._world.clock.advance(by)

    def close(self) -> None:
        self._world.close()


World = LocalWorld | FakeWorld | TpuVmWorld | ComputeWorld
WORLDS = {"local": LocalWorld, "fake": FakeWorld, "tpu-vm": TpuVmWorld, "compute": ComputeWorld}
# The Cloud TPU API shows no preemption notice; hosts see it in their metadata.
WITHOUT_NOTICE = {(TpuVmWorld, Fault.PREEMPT_NOTICE)}


@pytest.fixture(params=WORLDS.values(), ids=WORLDS.keys())
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = request.param(tmp_path)
    yield world
    world.close()


def order(*slices: str, accelerator: str = SLICE, zone: str = ZONE) -> Order:
    names = tuple(SliceId(name) for name in slices)
    return Order(
        id=f"order-{slices[0]}",
        slices=names,
        accelerator=accelerator,
        zone=zone,
        capacity=Capacity.SPOT,
        tokens={name: f"token of {name}" for name in names},
        server_url="http://127.0.0.1:1",
        fleet="test",
    )


def listed(world: World) -> dict[str, CloudSlice]:
    return {found.id: found for found in world.provider.listing()}


def becomes(world: World, condition: Callable[[dict[str, CloudSlice]], bool]) -> None:
    """Let time pass until the listing fulfils the condition."""
    patience = Patience(60)
    while not condition(listed(world)):
        assert not patience.is_over, listed(world)
        world.pass_time(timedelta(seconds=1))


def come_up(world: World, *slices: str) -> None:
    becomes(world, lambda now: all(now[name].state is CloudState.UP for name in slices))


DECIDED = (CloudState.UP, CloudState.REFUSED)


def granted(world: World, wanted: Order) -> bool:
    """Whether there is capacity for all. A refusal is raised, or listed later and released."""
    try:
        world.provider.request(wanted)
    except NoCapacity as error:
        assert ZONE in str(error)
        return False
    names = wanted.slices
    becomes(world, lambda now: all(now[name].state in DECIDED for name in names))
    found = [listed(world)[name] for name in names]
    assert len({each.state for each in found}) == 1, found
    if found[0].state is CloudState.UP:
        return True
    assert {each.refusal for each in found} == {RefusalKind.CAPACITY}
    for name in names:
        world.provider.release(name, ZONE)
    becomes(world, lambda now: not now.keys() & set(names))
    return False


def test_a_requested_slice_is_listed_at_once_and_comes_up(world):
    world.provider.request(order("a"))
    assert listed(world)["a"].state in (CloudState.PENDING, CloudState.CREATING, CloudState.UP)
    assert listed(world)["a"].zone == ZONE
    come_up(world, "a")
    assert listed(world)["a"].lost_hosts == ()


def test_a_repeated_request_gives_one_slice(world):
    world.limit(1)
    world.provider.request(order("a"))
    world.provider.request(order("a"))
    come_up(world, "a")
    world.provider.request(order("a"))
    assert list(listed(world)) == ["a"]
    assert listed(world)["a"].state is CloudState.UP


def test_releasing_an_unknown_slice_succeeds(world):
    world.provider.release(SliceId("never-was"), ZONE)
    world.provider.release(SliceId("../../etc"), ZONE)
    assert listed(world) == {}


def test_a_released_slice_disappears_and_a_second_release_succeeds(world):
    world.provider.request(order("a"))
    come_up(world, "a")
    world.provider.release(SliceId("a"), ZONE)
    becomes(world, lambda now: "a" not in now)
    world.provider.release(SliceId("a"), ZONE)
    assert listed(world) == {}


def test_a_slice_can_be_released_before_it_is_up(world):
    world.provider.request(order("a"))
    world.provider.release(SliceId("a"), ZONE)
    becomes(world, lambda now: "a" not in now)


def test_listing_changes_nothing(world):
    world.provider.request(order("a", "b"))
    come_up(world, "a", "b")
    world.provider.inject(SliceId("b"), Fault.PREEMPT)
    before = listed(world)
    for _ in range(5):
        assert listed(world) == before


def test_an_order_of_several_slices_is_granted_as_a_whole(world):
    world.provider.request(order("a", "b", "c"))
    come_up(world, "a", "b", "c")


def test_an_order_that_does_not_fit_is_refused_as_a_whole(world):
    world.limit(2)
    assert not granted(world, order("a", "b", "c"))
    assert listed(world) == {}
    world.provider.request(order("a", "b"))
    come_up(world, "a", "b")


def test_a_release_frees_capacity(world):
    world.limit(1)
    world.provider.request(order("a"))
    assert not granted(world, order("b"))
    world.provider.release(SliceId("a"), ZONE)
    becomes(world, lambda now: "a" not in now)
    world.provider.request(order("b"))
    come_up(world, "b")


def test_concurrent_requests_never_exceed_capacity(world):
    world.limit(3, SINGLE_HOST)

    def ask(number: int) -> bool:
        try:
            world.provider.request(order(f"s{number}", accelerator=SINGLE_HOST))
        except NoCapacity:
            return False
        return True

    with ThreadPoolExecutor(20) as pool:
        accepted = list(pool.map(ask, range(20)))
    assert set(listed(world)) == {f"s{number}" for number in range(20) if accepted[number]}
    becomes(world, lambda now: all(each.state in DECIDED for each in now.values()))
    assert sum(each.state is CloudState.UP for each in listed(world).values()) == 3


def test_an_unknown_accelerator_is_a_bad_request(world):
    with pytest.raises(BadRequest, match="v5litepod-17"):
        world.provider.request(order("a", accelerator="v5litepod-17"))
    assert listed(world) == {}


def test_slices_survive_a_crash_of_the_server(world):
    world.provider.request(order("a"))
    come_up(world, "a")
    world.reopen()
    assert listed(world)["a"].state is CloudState.UP
    world.provider.release(SliceId("a"), ZONE)
    becomes(world, lambda now: "a" not in now)


def test_a_boot_continues_after_a_crash_of_the_server(world):
    world.provider.request(order("a"))
    world.reopen()
    come_up(world, "a")


def test_a_preempted_slice_stays_listed_until_released(world):
    world.provider.request(order("a", "b"))
    come_up(world, "a", "b")
    world.provider.inject(SliceId("a"), Fault.PREEMPT)
    assert listed(world)["a"].state is CloudState.PREEMPTED
    world.pass_time(timedelta(hours=1))
    assert listed(world)["a"].state is CloudState.PREEMPTED
    assert listed(world)["b"].state is CloudState.UP
    world.provider.release(SliceId("a"), ZONE)
    becomes(world, lambda now: "a" not in now)


@pytest.mark.parametrize(
    ("fault", "notice"),
    [
        pytest.param(Fault.PREEMPT_NOTICE, NoticeKind.PREEMPTED, id="preemption"),
        pytest.param(Fault.MAINTENANCE, NoticeKind.MAINTENANCE, id="maintenance"),
    ],
)
def test_a_slice_stays_up_during_its_notice_period(world, fault, notice):
    world.provider.request(order("a"))
    come_up(world, "a")
    world.provider.inject(SliceId("a"), fault)
    assert listed(world)["a"].state is CloudState.UP
    shown = None if (type(world), fault) in WITHOUT_NOTICE else notice
    assert listed(world)["a"].notice is shown
    world.pass_time(timedelta(minutes=10))
    assert listed(world)["a"].state is CloudState.PREEMPTED
    assert listed(world)["a"].notice is shown


def test_a_killed_host_is_reported_and_the_others_are_alive(world):
    world.provider.request(order("a"))
    come_up(world, "a")
    world.provider.inject(SliceId("a"), Fault.KILL_HOST, 2)
    assert listed(world)["a"].state is CloudState.UP
    assert listed(world)["a"].lost_hosts == (() if type(world) is ComputeWorld else (2,))


def test_a_stalled_host_looks_alive_to_the_provider(world):
    world.provider.request(order("a"))
    come_up(world, "a")
    world.provider.inject(SliceId("a"), Fault.STALL_HOST, 1)
    assert listed(world)["a"].state is CloudState.UP
    assert listed(world)["a"].lost_hosts == ()


def test_a_fault_on_an_unknown_slice_is_a_bad_request(world):
    with pytest.raises(BadRequest, match="unknown"):
        world.provider.inject(SliceId("unknown"), Fault.PREEMPT)


def test_a_fault_calls_the_change_listeners(world):
    world.provider.request(order("a"))
    come_up(world, "a")
    woken: list[bool] = []
    world.provider.on_change(lambda: woken.append(True))
    world.provider.inject(SliceId("a"), Fault.PREEMPT)
    assert woken


def test_a_provider_adopts_what_exists_or_refuses_and_creates_nothing(world):
    with pytest.raises(BadRequest):
        world.provider.request(replace(order("s1"), node="somebodys", pool="lab"))
    world.provider.release(SliceId("s1"), ZONE)
    world.provider.release(SliceId("somebodys"), ZONE)
    assert listed(world) == {}
