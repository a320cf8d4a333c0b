"""Cleaning away what ended jobs left: that and nothing else, and only for those who may."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.service.harness import SPEC, ServiceHarness
from tests.service.test_files import packed
from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model.api_types import CleanRequest, NewJob
from tpufleet.model.jobs import JobId, JobState


def leave(
    service: ServiceHarness, job_id: str, *, state: JobState = JobState.FAILED, **spec
) -> None:
    """A job that ended, with a log, a result and a checkpoint."""
    service.submit(job_id, **spec)
    service.end_job(job_id, state)
    for kind, name, data in (
        ("logs", "0/s1.0.log", b"12345"),
        ("checkpoints", "7/state", b"123"),
    ):
        path = service.folder / kind / job_id / name
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    (service.folder / "results").mkdir(exist_ok=True)
    (service.folder / "results" / job_id).write_bytes(b"1")


def left(service: ServiceHarness, job_id: str) -> set[str]:
    kinds = ("logs", "results", "checkpoints")
    return {kind for kind in kinds if (service.folder / kind / job_id).exists()}


def listed(service: ServiceHarness, **query) -> list[str]:
    return sorted(row.id for row in service.client("mel").jobs(**query).jobs)


def test_what_a_job_left_is_deleted_and_what_is_known_of_it_stays(service):
    for name in ("one", "two"):
        leave(service, name)
    report = service.client("mel").clean(CleanRequest(jobs=("one",)))
    assert [(row.id, row.size) for row in report.jobs] == [("one", 9)] and report.size == 9
    assert (left(service, "one"), left(service, "two")) == (
        set(),
        {"logs", "results", "checkpoints"},
    )
    assert (listed(service), listed(service, cleaned=True)) == (["two"], ["one"])
    assert service.client("mel").job("one").job.state is JobState.FAILED
    assert service.client("mel").events("one").events[-1].message == (
        "cleaned by mel: deleted logs, code and checkpoints"
    )


def test_a_dry_run_tells_the_same_and_deletes_nothing(service):
    leave(service, "one")
    rehearsed = service.client("mel").clean(CleanRequest(dry_run=True))
    assert left(service, "one") == {"logs", "results", "checkpoints"} and listed(service) == ["one"]
    assert service.client("mel").clean(CleanRequest()) == rehearsed


def test_checkpoints_stay_when_they_are_to_be_kept(service):
    leave(service, "one")
    assert service.client("mel").clean(CleanRequest(checkpoints=False)).size == 6
    assert left(service, "one") == {"checkpoints"}


def test_checkpoints_that_another_job_named_as_its_own_stay(service):
    leave(service, "one")
    service.submit("two", checkpoint=f"{service.folder}/checkpoints/one")
    service.client("mel").clean(CleanRequest())
    assert left(service, "one") == {"checkpoints"}


def test_a_place_that_a_job_named_itself_is_not_touched(service, tmp_path_factory):
    own = tmp_path_factory.mktemp("own")
    (own / "state").write_text("precious")
    leave(service, "one", checkpoint=str(own))
    service.client("mel").clean(CleanRequest())
    assert (own / "state").read_text() == "precious"


def test_code_goes_with_the_last_job_that_has_it(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "train.py").write_text("print(1)\n")
    digest, data = packed(folder)
    client = service.client("mel")
    client.put_snapshot(digest, data)
    for name in ("one", "two"):
        client.submit([NewJob(id=JobId(name), spec=SPEC, snapshot=digest)])
        service.end_job(name)
    client.clean(CleanRequest(jobs=("one",)))
    assert client.has_snapshot(digest)
    assert client.clean(CleanRequest(jobs=("two",))).size == len(data)
    assert not client.has_snapshot(digest)


def test_a_family_goes_together_and_not_while_one_of_it_lives(service):
    leave(service, "one")
    child = service.client("mel").resume("one").id
    assert service.client("mel").clean(CleanRequest()).jobs == ()
    for named in ("one", child):
        with pytest.raises(Conflict, match=f"job {child} .* is queued"):
            service.client("mel").clean(CleanRequest(jobs=(named,)))
    service.end_job(child, JobState.SUCCEEDED)
    assert service.client("mel").clean(CleanRequest(states=frozenset({JobState.FAILED}))).jobs == ()
    report = service.client("mel").clean(CleanRequest(jobs=(child,)))
    assert {row.id for row in report.jobs} == {"one", child} and left(service, "one") == set()


def test_only_jobs_that_ended_long_enough_ago_in_such_a_state_go(service):
    leave(service, "old", state=JobState.SUCCEEDED)
    leave(service, "broken")
    service.clock.advance(timedelta(days=2))
    leave(service, "new", state=JobState.SUCCEEDED)
    order = CleanRequest(states=frozenset({JobState.SUCCEEDED}), older_than=timedelta(days=1))
    assert [row.id for row in service.client("mel").clean(order).jobs] == ["old"]
    with pytest.raises(BadInput, match="running is not an end state"):
        service.client("mel").clean(CleanRequest(states=frozenset({JobState.RUNNING})))


def test_people_clean_their_own_jobs_and_admins_everybodys(service):
    leave(service, "mels")
    leave(service, "mos", by="mo")
    with pytest.raises(Forbidden, match="mos"):
        service.client("mel").clean(CleanRequest(jobs=("mos",)))
    with pytest.raises(Forbidden, match="admin"):
        service.client("mel").clean(CleanRequest(all_owners=True))
    assert [row.id for row in service.client("mo").clean(CleanRequest()).jobs] == ["mos"]
    assert service.client("ada").clean(CleanRequest()).jobs == ()
    report = service.client("ada").clean(CleanRequest(all_owners=True))
    assert [row.id for row in report.jobs] == ["mels"]


def test_a_job_that_is_cleaned_twice_is_told_of_once(service):
    leave(service, "one")
    for _ in range(2):
        service.client("mel").clean(CleanRequest(jobs=("one",)))
    told = [event.state for event in service.client("mel").events("one").events]
    assert told.count("cleaned") == 1


def test_what_a_job_still_left_after_it_was_cleaned_away_can_be_deleted(service):
    leave(service, "one")
    service.store.clean(["one"], service.clock.now())  # and then the server died
    assert service.client("mel").clean(CleanRequest()).jobs == ()
    assert service.client("mel").clean(CleanRequest(jobs=("one",))).size == 9
    assert left(service, "one") == set()


def test_a_job_that_was_cleaned_away_says_so_to_those_who_need_what_it_left(service):
    leave(service, "one")
    client = service.client("mel")
    client.clean(CleanRequest())
    assert client.job("train").job.id == "one", "its name still finds it"
    for needs in (
        lambda: client.resume("one"),
        lambda: client.rerun("one"),
        lambda: "".join(client.logs("one")),
        lambda: list(client.follow_logs("one")),
        lambda: client.result("one"),
    ):
        with pytest.raises(Conflict, match="job one was cleaned on"):
            needs()
    with pytest.raises(NotFound):
        client.clean(CleanRequest(jobs=("nosuch",)))
