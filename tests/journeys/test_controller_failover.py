"""Controllers that die at any step, two at once, and hosts that cannot reach any."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_fleet import SECOND
from tests.journeys.simulated_hosts import Program
from tpufleet.errors import Fenced
from tpufleet.model.jobs import JobState

STEPS = ("observe", "plan", "commit", "act", "after")


def tick_and_die(world, step):
    """One tick that is cut off after this step; the next controller starts over."""
    controller = world.controllers[0]
    world.clock.advance(SECOND)
    world.live_hosts()
    world.beat()
    if controller.hold_lease():
        observation = controller.observe()
        if step != "observe":
            change = controller.plan(observation)
            if step != "plan":
                controller.commit(change)
                if step != "commit":
                    controller.act()
    world.restart_controller()
    world.clock.advance(timedelta(seconds=16))  # the dead one's lease runs out
    world.live_hosts()
    world.beat()
    world.invariants.check()


@pytest.mark.parametrize("step", STEPS)
def test_a_controller_that_dies_after_every_tick_at_this_step_loses_nothing(world, step):
    job = world.submit(Program(steps=30))
    for round in range(200):
        if world.job(job).ended:
            break
        tick_and_die(world, step)
        world.tick()  # the successor lives for one tick, then dies in its second
        if round == 6:
            gang = world.gang(job)
            if gang:
                world.preempt(job)
    world.settle(job)
    assert world.job(job).state is JobState.SUCCEEDED
    assert world.attempts(job)[-1] == "finished"
    assert len(world.disk.done[job]) == 1


def test_two_controllers_and_exactly_one_acts(world):
    world.controllers.append(world.new_controller("two"))
    jobs = [world.submit() for _ in range(4)]
    for _ in range(200):
        world.clock.advance(SECOND)
        world.live_hosts()
        world.beat()
        acted = [controller.tick() for controller in world.controllers]
        assert acted.count(True) <= 1
        world.invariants.check()
    assert all(world.job(job).state is JobState.SUCCEEDED for job in jobs)


def test_a_controller_that_slept_through_its_lease_cannot_write(world):
    job = world.submit(Program(steps=100))
    world.until_state(job, JobState.RUNNING)
    sleeper = world.controllers[0]
    sleeper.hold_lease()
    observation = sleeper.observe()
    world.preempt(job)
    world.clock.advance(timedelta(seconds=20))
    world.controllers = [world.new_controller("two")]
    world.run(10)
    world.cancel(job)
    with pytest.raises(Fenced):
        change = sleeper.plan(sleeper.observe() if not observation.messages else observation)
        sleeper.commit(change or _anything(world, job))
    world.settle(job)
    assert world.job(job).state is JobState.CANCELLED


def _anything(world, job):
    from tpufleet.stores.base import ChangeSet

    return ChangeSet(jobs=[world.job(job)])


def test_the_work_goes_on_while_no_controller_is_there(world):
    job = world.submit(Program(steps=200))
    world.until_state(job, JobState.RUNNING)
    gone, world.controllers = world.controllers, []
    world.run(120)
    world.controllers = [world.new_controller("two")]
    world.settle(job)
    assert world.attempts(job) == ["finished"], "nobody was declared lost meanwhile"
    assert gone


def test_hosts_cut_off_for_a_while_keep_working(world):
    """The whole control plane is away; nobody can hear anybody."""
    job = world.submit(Program(steps=200))
    world.until_state(job, JobState.RUNNING)
    world.reachable = False
    world.controllers = []
    world.run(300)
    world.reachable = True
    world.controllers = [world.new_controller("two")]
    world.settle(job)
    assert world.attempts(job) == ["finished"]


def test_one_host_cut_off_is_replaced_and_never_runs_beside_its_successor(world):
    job = world.submit(Program(steps=300))
    world.until_state(job, JobState.RUNNING)
    world.run(60)
    cut_off = world.all_hosts()[1]
    world.unreachable_hosts.add(cut_off.id)
    world.settle(job)
    assert world.attempts(job) == ["host_lost", "finished"]


def test_a_host_whose_lease_is_lost_stops_its_workload(world):
    job = world.submit(Program(steps=10_000, ignores_stop=True), grace="5s")
    world.until_state(job, JobState.RUNNING)
    world.reachable = False
    world.controllers = []
    world.run(615)
    assert [host.runs for host in world.all_hosts()] == [None] * 4
    world.reachable = True
    world.controllers = [world.new_controller("two")]
    world.cancel(job)
    world.settle(job)


def test_a_slice_that_a_dead_controller_asked_for_twice_is_one_slice(world):
    job = world.submit()
    for _ in range(3):
        tick_and_die(world, "act")
    assert len(world.cloud.existing()) <= 1
    world.settle(job)
    assert world.attempts(job) == ["finished"]
