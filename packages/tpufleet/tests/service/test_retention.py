"""Archiving deletes nothing; purging deletes what it lists and nothing else, for those who may."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest

from tests.nested_folders import make_nested, refuse_to_delete
from tests.service.harness import SPEC, ServiceHarness
from tests.service.test_files import packed
from tpufleet.errors import Conflict, Forbidden, NotFound
from tpufleet.model.api_types import NewJob, PurgeRequest
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.model.people.users import Role
from tpufleet.service.files.job_files import FILES, JobFiles
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.operations import archiving
from tpufleet.service.transport.auth import Caller


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


def purge_events(service: ServiceHarness, job_id: str) -> list[str]:
    events = service.client("mel").events(job_id).events
    return [event.message for event in events if event.state.startswith("purge")]


def listed(service: ServiceHarness, **query) -> list[str]:
    return sorted(row.id for row in service.client("mel").jobs(**query).jobs)


def test_archiving_hides_jobs_and_deletes_nothing(service):
    for name in ("one", "two"):
        leave(service, name)
    client = service.client("mel")
    client.archive(["one"])
    assert (listed(service), listed(service, archived=True)) == (["two"], ["one"])
    assert left(service, "one") == {"logs", "results", "checkpoints"}
    assert "".join(client.logs("one")) == "" and client.result("one") == b"1"
    child = client.resume("one").id  # an archived job can still be resumed
    assert listed(service) == sorted([child, "two"])
    client.unarchive(["one"])
    assert listed(service) == sorted([child, "one", "two"])


def test_a_name_means_an_archived_job_when_it_is_listed_again(service):
    leave(service, "older")
    service.clock.advance(timedelta(seconds=1))
    leave(service, "newer")
    client = service.client("mel")
    client.archive(["older", "newer"])
    assert [row.id for row in client.unarchive(["train"])] == ["newer"]
    assert [row.id for row in client.unarchive(["train"])] == ["older"]
    assert listed(service) == ["newer", "older"]


def test_archived_and_purged_jobs_keep_their_owner_and_name_in_the_costs(service):
    leave(service, "one")
    leave(service, "two")
    for number, job in enumerate(("one", "two")):
        service.add_slice(f"s{number}", job, up_at=service.clock.now())
        service.add_attempt(job, 0, f"s{number}", running_at=service.clock.now())
    service.clock.advance(timedelta(hours=1))
    before = service.client("mel").costs().rows
    service.client("mel").archive(["one"])
    service.client("mel").purge(PurgeRequest(jobs=("two",), checkpoints=True))
    after = service.client("mel").costs().rows
    assert [(row.job_id, row.job_name, row.owner) for row in after] == [
        ("one", "train", "mel"), ("two", "train", "mel"),
    ]  # fmt: skip
    assert after == before


def test_people_archive_their_own_jobs_only(service):
    leave(service, "mos", by="mo")
    with pytest.raises(Forbidden):
        service.client("mel").archive(["mos"])
    with pytest.raises(Forbidden):
        service.client("mel").unarchive(["mos"])
    assert [row.id for row in service.client("ada").archive(["mos"])] == ["mos"]


def jobs_with_the_same_code(service, tmp_path_factory) -> tuple[str, bytes]:
    """Ended jobs "one" and "two" of mel; the digest of their code, and the code."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "train.py").write_text("print(1)\n")
    digest, data = packed(folder)
    client = service.client("mel")
    client.put_snapshot(digest, data)
    for name in ("one", "two"):
        client.submit([NewJob(id=JobId(name), spec=SPEC, snapshot=digest)])
        service.end_job(name)
    return digest, data


def test_files_of_archived_jobs_protect_what_they_share(service, tmp_path_factory):
    digest, _ = jobs_with_the_same_code(service, tmp_path_factory)
    client = service.client("mel")
    client.archive(["one"])
    client.purge(PurgeRequest(jobs=("two",)))
    assert client.has_snapshot(digest), "the archived job can still be resumed"


def test_logs_and_results_are_deleted_and_checkpoints_only_on_request(service):
    for name in ("one", "two"):
        leave(service, name)
    client = service.client("mel")
    report = client.purge(PurgeRequest(jobs=("one",), dry_run=True))
    assert [(row.id, row.size, row.checkpoint_size) for row in report.jobs] == [("one", 6, 3)]
    assert report.size == 6 and not report.jobs[0].with_checkpoints
    assert client.purge(PurgeRequest(jobs=("one",))) == report
    assert left(service, "one") == {"checkpoints"}


def test_what_a_job_left_is_deleted_and_what_is_known_of_it_stays(service):
    for name in ("one", "two"):
        leave(service, name)
    report = service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True))
    assert [(row.id, row.size, row.checkpoint_size) for row in report.jobs] == [("one", 6, 3)]
    assert report.size == 9
    assert (left(service, "one"), left(service, "two")) == (
        set(),
        {"logs", "results", "checkpoints"},
    )
    assert (listed(service), listed(service, archived=True)) == (["two"], ["one"])
    assert service.client("mel").job("one").job.state is JobState.FAILED
    assert service.client("mel").events("one").events[-1].message == (
        "purged by mel: deleted logs, results and checkpoints"
    )


def test_a_dry_run_tells_the_same_and_deletes_nothing(service):
    leave(service, "one")
    request = PurgeRequest(jobs=("one",), dry_run=True, checkpoints=True)
    rehearsed = service.client("mel").purge(request)
    assert left(service, "one") == {"logs", "results", "checkpoints"} and listed(service) == ["one"]
    assert service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True)) == rehearsed


def test_checkpoints_that_another_job_named_as_its_own_stay(service):
    leave(service, "one")
    service.submit("two", checkpoint=f"{service.folder}/checkpoints/one")
    service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True))
    assert left(service, "one") == {"checkpoints"}


def test_a_place_that_a_job_named_itself_is_not_touched(service, tmp_path_factory):
    own = tmp_path_factory.mktemp("own")
    (own / "state").write_text("precious")
    leave(service, "one", checkpoint=str(own))
    service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True))
    assert (own / "state").read_text() == "precious"


def test_code_goes_with_the_last_job_that_has_it(service, tmp_path_factory):
    digest, data = jobs_with_the_same_code(service, tmp_path_factory)
    client = service.client("mel")
    client.purge(PurgeRequest(jobs=("one",)))
    assert client.has_snapshot(digest)
    assert client.purge(PurgeRequest(jobs=("two",))).size == len(data)
    assert not client.has_snapshot(digest)


def test_only_the_named_job_goes_and_not_those_that_it_came_from(service):
    client = service.client("mel")
    leave(service, "solo", state=JobState.SUCCEEDED)
    for name in ("solo-b", "solo-c"):
        client.rerun("solo", job_id=name)
        service.end_job(name)
    for request in (
        PurgeRequest(jobs=("solo-b",), checkpoints=True, dry_run=True),
        PurgeRequest(jobs=("solo-b",), checkpoints=True),
    ):
        assert [row.id for row in client.purge(request).jobs] == ["solo-b"]
    assert left(service, "solo") == {"logs", "results", "checkpoints"}
    assert [row.id for row in client.archive(["solo-c"])] == ["solo-c"]
    assert listed(service) == ["solo"]


def test_checkpoints_are_kept_for_the_jobs_that_were_resumed_from_them(service):
    leave(service, "one")
    client = service.client("mel")
    child = client.resume("one").id
    with pytest.raises(Conflict, match=f"job {child} .* is queued"):
        client.purge(PurgeRequest(jobs=(child,)))
    [row] = client.purge(PurgeRequest(jobs=("one",), checkpoints=True)).jobs
    assert (row.with_checkpoints, row.checkpoints_used_by) == (False, (child,))
    assert left(service, "one") == {"checkpoints"}
    service.end_job(child, JobState.SUCCEEDED)
    report = client.purge(PurgeRequest(jobs=("one", child), checkpoints=True))
    assert all(row.with_checkpoints for row in report.jobs) and left(service, "one") == set()


def test_people_purge_their_own_jobs_and_admins_those_of_everyone(service):
    leave(service, "mels")
    leave(service, "mos", by="mo")
    with pytest.raises(Forbidden, match="mos"):
        service.client("mel").purge(PurgeRequest(jobs=("mos",)))
    for caller, job in (("mo", "mos"), ("ada", "mels")):
        report = service.client(caller).purge(PurgeRequest(jobs=(job,)))
        assert [row.id for row in report.jobs] == [job]


@pytest.mark.parametrize("body", [{}, {"checkpoints": True}, {"jobs": []}], ids=str)
def test_nothing_is_purged_without_naming_it(service, body):
    leave(service, "one")
    with service.http(service.tokens["mel"]) as http:
        assert http.post("/purge", json=body).status_code == 400
    assert left(service, "one") == {"logs", "results", "checkpoints"}


def test_a_job_that_is_purged_twice_has_one_event(service):
    leave(service, "one")
    for _ in range(2):
        service.client("mel").purge(PurgeRequest(jobs=("one",)))
    event_states = [event.state for event in service.client("mel").events("one").events]
    assert event_states.count("purged") == 1


def test_a_second_purge_reports_only_what_was_left(service):
    for name in ("one", "two"):
        leave(service, name)
    client = service.client("mel")
    request = PurgeRequest(jobs=("one",))
    assert client.purge(request).size == 6
    for again in (PurgeRequest(jobs=("one",), dry_run=True), request):
        assert client.purge(again).jobs == ()
    report = client.purge(PurgeRequest(jobs=("one", "two")))
    assert [row.id for row in report.jobs] == ["two"]
    report = client.purge(PurgeRequest(jobs=("one",), checkpoints=True))
    assert [row.id for row in report.jobs] == ["one"] and report.size == 3
    assert client.purge(PurgeRequest(jobs=("one",), checkpoints=True)).jobs == ()


def test_one_of_two_purges_at_a_time_reports_the_deletion(service, monkeypatch):
    leave(service, "one")
    began, may_end, rmdir = threading.Event(), threading.Event(), os.rmdir

    def rmdir_slowly(path, *, dir_fd=None):
        began.set()
        may_end.wait(60)
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir_slowly)
    request = PurgeRequest(jobs=("one",))
    first, second = service.client("mel"), service.client("mel")
    with ThreadPoolExecutor(1) as threads:
        deletion = threads.submit(first.purge, request)
        assert began.wait(60)
        try:
            assert second.purge(request).jobs == ()
        finally:
            may_end.set()
        assert deletion.result(60).size == 6
    assert left(service, "one") == {"checkpoints"}


def test_files_that_a_crash_left_behind_can_be_deleted(service):
    leave(service, "one")
    service.store.mark_files_deleted(["one"], service.clock.now())  # and then the server died
    assert service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True)).size == 9
    assert left(service, "one") == set()


def test_a_request_that_needs_deleted_files_is_rejected(service):
    leave(service, "one")
    client = service.client("mel")
    client.purge(PurgeRequest(jobs=("one",)))
    assert client.job("train").job.id == "one", "its name still finds it"
    for needs in (
        lambda: client.resume("one"),
        lambda: client.rerun("one"),
        lambda: "".join(client.logs("one")),
        lambda: list(client.follow_logs("one")),
        lambda: client.result("one"),
    ):
        with pytest.raises(Conflict, match="the files of job one were deleted on"):
            needs()
    with pytest.raises(NotFound):
        client.purge(PurgeRequest(jobs=("nosuch",)))


@pytest.mark.parametrize("levels", [1500, 3000])
def test_deeply_nested_checkpoints_are_measured_and_deleted(service, levels):
    leave(service, "one")
    make_nested(service.folder / "checkpoints" / "one", levels, file=b"1234")
    client = service.client("mel")
    request = PurgeRequest(jobs=("one",), checkpoints=True)
    rehearsal = PurgeRequest(jobs=("one",), checkpoints=True, dry_run=True)
    [row] = client.purge(rehearsal).jobs
    assert row.checkpoint_size == 3 + 4
    assert client.purge(request).jobs == (row,)
    assert left(service, "one") == set()


def test_a_link_in_place_of_checkpoints_is_deleted_and_not_followed(service, tmp_path):
    leave(service, "one")
    outside = tmp_path / "outside"
    (service.folder / "checkpoints" / "one").rename(outside)
    (service.folder / "checkpoints" / "one").symlink_to(outside)
    service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True))
    assert left(service, "one") == set()
    assert (outside / "7" / "state").read_bytes() == b"123"


def test_files_of_the_other_jobs_are_deleted_when_those_of_one_cannot_be(service, monkeypatch):
    for name in ("one", "two", "three"):
        leave(service, name)
    (service.folder / "checkpoints" / "one" / "busy").mkdir()
    refuse_to_delete("busy", monkeypatch)
    with pytest.raises(Conflict, match="some files of job one cannot be deleted"):
        service.client("mel").purge(PurgeRequest(jobs=("one", "two", "three"), checkpoints=True))
    assert left(service, "two") == left(service, "three") == set()
    assert left(service, "one") == {"checkpoints"}
    assert purge_events(service, "two") == ["purged by mel: deleted logs, results and checkpoints"]
    failed = (
        "purged by mel: some files could not be deleted: Device or resource busy; "
        "`tpu archive purge --checkpoints one` deletes what is left"
    )
    assert purge_events(service, "one") == [failed]
    monkeypatch.undo()
    (service.folder / "checkpoints" / "one" / "file").write_bytes(b"1")
    service.client("mel").purge(PurgeRequest(jobs=("one",), checkpoints=True))
    assert purge_events(service, "one") == [
        failed, "purged by mel: deleted logs, results and checkpoints",
    ]  # fmt: skip


def test_code_that_another_job_needs_is_not_reported_as_deleted(service, tmp_path_factory):
    jobs_with_the_same_code(service, tmp_path_factory)
    client = service.client("mel")
    for name in ("one", "two"):
        client.purge(PurgeRequest(jobs=(name,)))
    assert purge_events(service, "one") == ["purged by mel: deleted logs and results"]
    assert purge_events(service, "two") == ["purged by mel: deleted logs, results and code"]


@dataclass(frozen=True, kw_only=True)
class SlowlyCountedFiles(JobFiles):
    """Counting takes until a test allows it."""

    counting: threading.Event
    may_end: threading.Event

    def size(self, job_id: JobId, kinds: Sequence[str] = FILES) -> int:
        self.counting.set()
        self.may_end.wait(60)
        return JobFiles.size(self, job_id, kinds)


def slow_purge(service: ServiceHarness) -> tuple[CommandContext, SlowlyCountedFiles]:
    files = SlowlyCountedFiles(
        state=service.folder,
        snapshots=SnapshotFiles(service.folder / "snapshots"),
        counting=threading.Event(),
        may_end=threading.Event(),
    )
    context = CommandContext(
        store=service.store, caller=Caller(name="mel", role=Role.MEMBER), now=service.clock.now()
    )
    return context, files


def test_others_do_not_wait_while_the_files_of_a_purge_are_counted(service):
    leave(service, "one")
    service.submit("two", by="mo")
    service.end_job("two")
    context, files = slow_purge(service)
    request = PurgeRequest(jobs=("one",), checkpoints=True)
    with ThreadPoolExecutor(1) as threads:
        purge = threads.submit(archiving.purge, context, files, request)
        assert files.counting.wait(60)
        try:
            service.client("mo", timeout=20).resume("two")
            with pytest.raises(Conflict, match="were deleted"):
                service.client("mel").resume("one")
        finally:
            files.may_end.set()
        assert purge.result(60).size == 9
    assert left(service, "one") == set()


def test_code_that_is_submitted_again_while_files_are_counted_is_kept(service, tmp_path_factory):
    digest, _ = jobs_with_the_same_code(service, tmp_path_factory)
    context, files = slow_purge(service)
    with ThreadPoolExecutor(1) as threads:
        purge = threads.submit(archiving.purge, context, files, PurgeRequest(jobs=("one", "two")))
        assert files.counting.wait(60)
        try:
            service.client("mel").submit([NewJob(id=JobId("three"), spec=SPEC, snapshot=digest)])
        finally:
            files.may_end.set()
        purge.result(60)
    assert files.snapshots.has(digest)
