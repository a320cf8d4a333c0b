"""A heartbeat in, the assignment out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.fleet.hosts import (
    Exit,
    HostId,
    HostLiveness,
    NoticeKind,
    Phase,
    Progress,
    ProgressPoint,
)
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.recovery import liveness
from tpufleet.service.hosts.heartbeats import Heartbeats
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore


def reported_phases(service: ServiceHarness) -> list[Phase]:
    return [
        m.heartbeat.phase
        for m in service.store.inbox()
        if m.kind is InboxMessageKind.HEARTBEAT and m.heartbeat
    ]


@pytest.fixture
def running(service: ServiceHarness) -> ServiceHarness:
    service.submit("job-1", slices=2, env={"A": "b"}, grace="7s")
    service.add_slice("s1", "job-1")
    service.add_slice("s2", "job-1")
    service.add_attempt("job-1", 0, "s1", "s2")
    return service


def test_a_multislice_gang_is_numbered_over_all_its_slices(running):
    assignments = {
        host: running.send_heartbeat(host).assignment for host in ("s1/0", "s1/3", "s2/0", "s2/2")
    }
    numbers = {
        host: (each.worker_id, each.slice_index, each.process_id)
        for host, each in assignments.items()
    }
    assert numbers == {
        "s1/0": (0, 0, 0),
        "s1/3": (3, 0, 3),
        "s2/0": (0, 1, 4),
        "s2/2": (2, 1, 6),
    }
    for each in assignments.values():
        assert (each.num_slices, each.num_processes) == (2, 8)
        assert each.coordinator_address == "10.0.1.0:8476"
        assert each.megascale_coordinator == "10.0.1.0"
        assert each.chips == 4


def test_an_assignment_holds_what_the_job_file_says(running):
    assignment = running.send_heartbeat("s2/1").assignment
    assert assignment.command == ("python", "train.py")
    assert assignment.env["A"] == "b"
    assert assignment.grace == timedelta(seconds=7)
    assert assignment.hostnames == ("10.0.2.0", "10.0.2.1", "10.0.2.2", "10.0.2.3")
    assert assignment.attempt_id == "job-1.0"
    assert assignment.checkpoint.endswith("/checkpoints/job-1")
    assert assignment.stop is None


@pytest.mark.parametrize(
    ("change", "stop"),
    [
        (dict(stop_reason=EndReason.CANCELLED), EndReason.CANCELLED),
        (dict(), EndReason.USER_ERROR),
    ],
    ids=["told why", "because a sibling ended"],
)
def test_a_stopping_attempt_is_told_to_stop_though_it_was_answered_before(running, change, stop):
    assert running.send_heartbeat("s1/0").assignment.stop is None
    running.add_attempt("job-1", 0, "s1", "s2", state=AttemptState.STOPPING, **change)
    assert running.send_heartbeat("s1/0").assignment.stop is stop


def test_nothing_is_assigned_once_the_attempt_has_ended(running):
    assert running.send_heartbeat("s1/0").assignment is not None
    running.add_attempt(
        "job-1", 0, "s1", "s2", state=AttemptState.ENDED, end_reason=EndReason.PREEMPTED
    )
    assert running.send_heartbeat("s1/0").assignment is None
    running.add_attempt("job-1", 1, "s1", "s2")
    assert running.send_heartbeat("s1/0").assignment.attempt_id == "job-1.1"


def test_nothing_is_assigned_to_a_slice_that_is_not_the_attempts(running):
    running.add_slice("s3", "job-1")
    running.add_slice("s4", None)
    assert running.send_heartbeat("s3/0").assignment is None
    assert running.send_heartbeat("s4/0").assignment is None


def test_attempts_after_a_rerun_leave_the_older_checkpoints_alone(running):
    before = running.send_heartbeat("s1/0").assignment.checkpoint
    running.add_attempt("job-1", 0, "s1", "s2", state=AttemptState.ENDED)
    running.change_job("job-1", fresh_from=1)
    running.add_attempt("job-1", 1, "s1", "s2")
    fresh = running.send_heartbeat("s1/0").assignment.checkpoint
    assert fresh != before
    running.add_attempt("job-1", 1, "s1", "s2", state=AttemptState.ENDED)
    running.add_attempt("job-1", 2, "s1", "s2")
    assert running.send_heartbeat("s1/0").assignment.checkpoint == fresh


@pytest.mark.parametrize("state", [SliceState.RELEASING, SliceState.GONE])
def test_agents_of_a_slice_that_we_let_go_of_are_told_to_leave(running, state):
    running.add_slice("s1", "job-1", state=state)
    reply = running.send_heartbeat("s1/0")
    assert reply.release
    assert reply.assignment is None


def test_processes_on_a_slice_that_we_let_go_of_are_killed_with_those_of_their_gang(running):
    running.add_slice("s1", "job-1", state=SliceState.RELEASING)
    changed = {"state": AttemptState.STOPPING, "stop_reason": EndReason.PREEMPTED}
    running.add_attempt("job-1", 0, "s1", "s2", **changed, aborted=True)
    reply = running.send_heartbeat("s1/0", attempt_id="job-1.0")
    assert reply.release and reply.assignment.abort
    assert running.send_heartbeat("s1/1").assignment is None, "nothing is started there"


def test_agents_of_a_slice_that_we_do_not_know_are_told_to_leave(service):
    assert service.send_heartbeat("never-heard-of/0").release


def test_a_doomed_slice_still_works(running):
    running.add_slice("s1", "job-1", state=SliceState.DOOMED)
    reply = running.send_heartbeat("s1/0")
    assert reply.assignment is not None
    assert not reply.release


def test_a_beat_without_news_is_a_pulse_and_no_message(running):
    before = len(running.store.inbox())
    running.send_heartbeat("s1/0", progress=Progress(step=3, total=9))
    pulse = wait_until(lambda: running.store.last_heartbeats([HostId("s1/0")]).get(HostId("s1/0")))
    assert pulse.progress.step == 3
    assert len(running.store.inbox()) == before


@pytest.mark.parametrize(
    "change",
    [
        dict(boot="another"),
        dict(address="10.9.9.9"),
        dict(coordinator_port=1),
        dict(phase=Phase.RUNNING),
        dict(attempt_id="job-1.0"),
        dict(notice=NoticeKind.PREEMPTED),
        dict(exit=Exit(at=datetime(2026, 1, 1, tzinfo=UTC), status=1)),
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_new_about_a_host_wakes_the_controller(running, change):
    woken = running.woken
    running.send_heartbeat("s1/0", **change)
    assert len(reported_phases(running)) == 1
    assert running.woken > woken


def test_news_is_told_once_until_the_controller_acts_or_time_passes(running):
    for _ in range(3):
        running.send_heartbeat("s1/0", phase=Phase.SETUP)
    assert reported_phases(running) == [Phase.SETUP]
    running.clock.advance(timedelta(seconds=11))
    running.send_heartbeat("s1/0", phase=Phase.SETUP)
    assert reported_phases(running) == [Phase.SETUP, Phase.SETUP]


def test_news_that_is_undone_before_the_controller_saw_it_is_told_too(running):
    running.send_heartbeat("s1/0", phase=Phase.SETUP)
    running.send_heartbeat("s1/0", phase=Phase.IDLE)
    assert reported_phases(running) == [Phase.SETUP, Phase.IDLE]


def test_a_host_that_has_no_row_yet_is_news(service):
    service.add_slice("s1", None, state=SliceState.BOOTING, with_hosts=False)
    assert service.store.host(HostId("s1/0")) is None
    service.send_heartbeat("s1/0")
    assert reported_phases(service) == [Phase.IDLE]


def test_a_host_beyond_the_size_of_its_slice_is_refused(running):
    with running.http(running.slice_token("s1")) as http:
        answer = http.post("/agent/heartbeat", content=to_json(running.make_heartbeat("s1/4")))
    assert answer.status_code == 400
    assert "hosts 0 to 3" in answer.text


def test_secrets_are_resolved_at_the_moment_of_the_beat(service):
    service.client("mel").put_secret("hf", "first value")
    service.submit("job-1", secrets={"HF_TOKEN": "hf", "LOCAL": "file:/etc/token"})
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    first = service.send_heartbeat("s1/0").assignment.secrets
    service.client("mel").put_secret("hf", "second value")
    second = service.send_heartbeat("s1/0").assignment.secrets
    assert first == {"HF_TOKEN": "first value", "LOCAL": "file:/etc/token"}
    assert second["HF_TOKEN"] == "second value"


def test_secrets_are_not_sent_again_to_an_agent_that_has_them(service):
    service.client("mel").put_secret("hf", "canary")
    service.submit("job-1", secrets={"HF_TOKEN": "hf"})
    service.add_slice("s1", "job-1")
    attempt = service.add_attempt("job-1", 0, "s1")
    assert service.send_heartbeat("s1/0").assignment.secrets == {"HF_TOKEN": "canary"}
    for phase in (Phase.SETUP, Phase.RUNNING):
        reply = service.send_heartbeat("s1/0", attempt_id=attempt.id, phase=phase)
        assert reply.assignment.attempt_id == attempt.id
        assert "canary" not in repr(reply)


def test_beats_come_more_slowly_when_there_are_many_hosts(running):
    many = [
        HostLiveness(host_id=HostId(f"x/{n}"), seen_at=running.clock.now()) for n in range(7000)
    ]
    running.store.record_heartbeats(many)
    assert running.send_heartbeat("s1/0").next_heartbeat >= timedelta(seconds=10)


def test_hosts_that_wait_for_an_attempt_report_more_often(service):
    """So that it begins at once; others hear of a stop within a second."""
    service.submit("job-1", accelerator="v5litepod-4")
    service.add_slice("s1", "job-1", accelerator="v5litepod-4")
    service.add_slice("s2", None)
    waiting = service.send_heartbeat("s1/0").next_heartbeat
    assert waiting < service.send_heartbeat("s2/0").next_heartbeat == timedelta(seconds=1)
    attempt = service.add_attempt("job-1", 0, "s1")
    state = {"attempt_id": attempt.id, "phase": Phase.RUNNING}
    assert service.send_heartbeat("s1/0", **state).next_heartbeat == timedelta(seconds=1)
    ended = state | {"phase": Phase.EXITED, "exit": Exit(at=service.clock.now(), status=1)}
    assert service.send_heartbeat("s1/0", **ended).next_heartbeat == waiting


@pytest.mark.parametrize(
    ("hosts", "seconds"), [(2, 0.3), (60, 0.5), (120, 1.0), (1200, 2.0)], ids=str
)
def test_hosts_of_a_gang_hear_soon_that_another_has_failed(service, hosts, seconds):
    """As often as a fleet of that size allows."""
    service.submit("job-1", accelerator="v5litepod-8", slices=2)
    for name in ("s1", "s2"):
        service.add_slice(name, "job-1", accelerator="v5litepod-8")
    attempt = service.add_attempt("job-1", 0, "s1", "s2")
    service.store.record_heartbeats(
        [
            HostLiveness(host_id=HostId(f"x/{number}"), seen_at=service.clock.now())
            for number in range(hosts)
        ]
    )
    reply = service.send_heartbeat("s1/0", attempt_id=attempt.id, phase=Phase.RUNNING)
    assert reply.next_heartbeat == timedelta(seconds=seconds)


def test_an_agent_hears_that_its_attempt_can_complete_no_step(running):
    attempt = running.store.attempts(JobId("job-1"))[0]
    stopping = replace(attempt, state=AttemptState.STOPPING, aborted=True)
    running.store.commit(ChangeSet(attempts=[stopping]))
    assignment = running.send_heartbeat("s2/1", attempt_id=attempt.id).assignment
    assert assignment.stop is not None and assignment.abort


def test_pulses_that_were_gathered_are_written_when_the_server_stops(running):
    running.send_heartbeat("s1/0", progress=Progress(step=5))
    running.stop()
    assert running.store.last_heartbeats([HostId("s1/0")])[HostId("s1/0")].progress.step == 5
    running.start()


def test_a_job_that_ended_leaves_nothing_to_run(running):
    running.add_attempt("job-1", 0, "s1", "s2", state=AttemptState.ENDED)
    running.end_job("job-1", JobState.SUCCEEDED)
    assert running.send_heartbeat("s2/3").assignment is None


def test_a_resumed_job_continues_its_stage_and_its_run(service):
    """TPUFLEET_STAGE counts over attempts and resumed jobs; a rerun starts again."""

    def variables(job_id: str, number: int) -> dict[str, str]:
        name = f"slice-{job_id[-1]}{number}"
        service.add_slice(name, job_id)
        service.add_attempt(job_id, number, name)
        reply = service.send_heartbeat(f"{name}/0")
        assert reply.assignment is not None
        ended = replace(
            service.store.attempts(JobId(job_id))[number],
            state=AttemptState.ENDED,
            ended_at=service.clock.now(),
        )
        service.store.commit(ChangeSet(attempts=[ended]))
        return reply.assignment.env

    service.submit("job-1", env={"LR": "1"})
    first, second = variables("job-1", 0), variables("job-1", 1)
    assert (first["TPUFLEET_STAGE"], second["TPUFLEET_STAGE"]) == ("0", "1")
    assert first["WANDB_RUN_ID"] == second["WANDB_RUN_ID"] == "job-1" and first["LR"] == "1"
    service.end_job("job-1")
    client = service.client()
    client.resume("job-1", job_id=JobId("job-2"))
    resumed = variables("job-2", 0)
    assert resumed["TPUFLEET_STAGE"] == "2" and resumed["WANDB_RUN_ID"] == "job-1"
    service.end_job("job-2")
    client.rerun("job-2", {"env": {"WANDB_RUN_ID": "mine"}}, job_id=JobId("job-3"))
    again = variables("job-3", 0)
    assert again["TPUFLEET_STAGE"] == "0" and again["WANDB_RUN_ID"] == "mine"


def test_a_short_job_keeps_all_points_that_its_agent_gathered(service):
    start = service.clock.now()
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    points = [
        ProgressPoint(at=start + timedelta(milliseconds=50 * n), step=n, metrics={"loss": 1 / n})
        for n in range(1, 21)
    ]
    service.clock.advance(timedelta(seconds=1))
    for half in (points[:10], points[10:]):
        service.send_heartbeat(
            "s1/0", attempt_id="job-1.0", phase=Phase.RUNNING, points=tuple(half),
            progress=Progress(step=half[-1].step, at=half[-1].at, metrics=half[-1].metrics),
        )  # fmt: skip
    client = service.client("mel")
    wait_until(lambda: len(client.metrics("job-1").points) == 20)
    series = client.metrics("job-1").points
    assert [point.step for point in series] == list(range(1, 21))
    assert series[3].values == {"loss": 0.25}
    service.send_heartbeat("s1/1", attempt_id="job-1.0", points=tuple(points))
    assert len(client.metrics("job-1").points) == 20, "process 0 reports for the job"


def test_points_that_two_heartbeats_carry_are_recorded_once(service):
    start = service.clock.now()
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    points = [
        ProgressPoint(at=start + timedelta(seconds=n / 10), step=n, metrics={"loss": 1 / n})
        for n in range(1, 101)
    ]
    service.clock.advance(timedelta(seconds=10))
    for sent in (points[:50], points[:60], points[50:], points[50:]):  # answers were lost
        service.clock.advance(timedelta(seconds=3))
        last = sent[-1]
        progress = Progress(step=last.step, at=last.at, metrics={"acc": 1.0, **last.metrics})
        service.send_heartbeat(
            "s1/0", attempt_id="job-1.0", phase=Phase.RUNNING, points=tuple(sent), progress=progress
        )
    # The attempt keeps the last report, with the time of another heartbeat.
    service.add_attempt(
        "job-1", 0, "s1", state=AttemptState.ENDED, last_step=100, progress_at=service.clock.now(),
        metrics={"acc": 1.0, "loss": 1 / 100},
    )  # fmt: skip
    client = service.client("mel")
    wait_until(lambda: len(client.metrics("job-1").points) >= 100)
    assert [point.step for point in client.metrics("job-1").points] == list(range(1, 101))


def test_hosts_that_report_less_than_once_a_minute_count_for_the_interval(service):
    """Otherwise a fleet of that size would be told to report more often, and then less again."""
    service.add_slice("s1", None)
    hosts, seen_at = 7_000, service.clock.now() - timedelta(minutes=3)
    service.store.record_heartbeats(
        [HostLiveness(host_id=HostId(f"s9/{number}"), seen_at=seen_at) for number in range(hosts)]
    )
    expected = liveness.heartbeat_interval(hosts)
    assert service.send_heartbeat("s1/0").next_heartbeat == expected > timedelta(seconds=9)


def test_a_large_fleet_is_counted_less_often(service, monkeypatch):
    """All rows are read for it, which in a database takes tens of milliseconds."""
    service.add_slice("s1", None)
    count, counted = service.store.count_seen_hosts, []
    monkeypatch.setattr(
        service.store, "count_seen_hosts", lambda since: counted.append(since) or count(since)
    )
    hosts = 80_000
    service.store.record_heartbeats(
        [
            HostLiveness(host_id=HostId(f"s9/{number}"), seen_at=service.clock.now())
            for number in range(hosts)
        ]
    )
    for _ in range(10):
        service.send_heartbeat("s1/0")
        service.clock.advance(timedelta(seconds=6))
    interval = liveness.heartbeat_interval(hosts)
    wait_until(lambda: len(counted) >= timedelta(seconds=54) // (interval / 10))
    assert len(counted) <= 5


def test_a_full_disk_is_told_without_a_stack_for_every_retry(caplog):
    class FullStore(MemoryStore):
        def record_heartbeats(self, reports):
            raise Unreachable("no space left")

    heartbeats = Heartbeats(FullStore(), assignments=None, wake=lambda: None)
    heartbeats._liveness["h/0"] = None

    def warnings():
        return [each for each in caplog.records if "host liveness" in each.getMessage()]

    async def until_retried():
        flushing = asyncio.create_task(heartbeats.flush_forever(every=0.01))
        while len(warnings()) < 2:
            await asyncio.sleep(0.01)
        flushing.cancel()

    asyncio.run(asyncio.wait_for(until_retried(), 60))
    for record in warnings():
        assert "no space left" in record.getMessage() and not record.exc_info


def test_hosts_are_seen_also_while_metrics_cannot_be_written():
    class NoMetrics(MemoryStore):
        def record_metrics(self, points):
            raise BadInput("value rejected")

    now = datetime(2026, 1, 1, tzinfo=UTC)
    store = NoMetrics()
    heartbeats = Heartbeats(store, assignments=None, wake=lambda: None)
    heartbeats._metrics.report(JobId("j1"), Progress(step=1), now)
    heartbeats._liveness[HostId("s1/0")] = HostLiveness(host_id=HostId("s1/0"), seen_at=now)
    with pytest.raises(BadInput):
        asyncio.run(heartbeats.flush())
    assert store.last_heartbeats([HostId("s1/0")])[HostId("s1/0")].seen_at == now
