"""At most one live job writes to a checkpoint location, however requests interleave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import structs

from tests.service.harness import SPEC, ServiceHarness
from tpufleet.errors import BadInput, Conflict, FleetError, Forbidden
from tpufleet.model.api_types import NewJob, PurgeRequest
from tpufleet.model.job.jobs import JobId
from tpufleet.service.jobs import checkpoint_leases


def new(job_id: str, **spec: Any) -> NewJob:
    return NewJob(id=JobId(job_id), spec={**SPEC, **spec})


def live(service: ServiceHarness) -> list[str]:
    return [job.id for job in service.store.live().jobs]


def together(*calls: Any) -> list[FleetError | None]:
    """Call all of them at once; the error of each, or None."""

    def error_of(call: Any) -> FleetError | None:
        try:
            call()
        except FleetError as error:
            return error
        return None

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(error_of, calls))


@pytest.mark.parametrize("round_", range(5))
def test_of_concurrent_resumes_one_succeeds(service, round_):
    service.submit("job-1")
    service.end_job("job-1")
    client = service.client("mel")
    errors = together(*(lambda: client.resume("job-1") for _ in range(8)))
    assert len(live(service)) == 1
    refused = [error for error in errors if error is not None]
    assert len(refused) == 7
    assert all(isinstance(error, Conflict) and "tpu cancel" in str(error) for error in refused)


@pytest.mark.parametrize("round_", range(5))
def test_a_job_is_resumed_or_cleaned_but_not_both(service, round_):
    service.submit("job-1")
    service.end_job("job-1")
    folder = service.folder / "checkpoints" / "job-1"
    folder.mkdir(parents=True)
    client = service.client("mel")
    together(
        lambda: client.purge(PurgeRequest(jobs=("job-1",), checkpoints=True)),
        lambda: client.resume("job-1"),
    )
    assert bool(live(service)) == folder.exists()


def test_a_location_in_use_is_refused_until_its_job_has_ended(service):
    mel, mo = service.client("mel"), service.client("mo")
    mel.submit([new("job-1", checkpoint="gs://bucket/run")])
    assert mel.submit([new("job-1", checkpoint="gs://bucket/run")])  # the same one again
    for location in ("gs://bucket/run", "gs://bucket/run/"):
        with pytest.raises(Conflict, match=r"in use by job job-1 .*use another\s+location"):
            mo.submit([new("job-2", checkpoint=location)])
    mo.submit([new("job-3", checkpoint="gs://bucket/run-2")])
    service.end_job("job-1")
    mo.submit([new("job-2", checkpoint="gs://bucket/run")])


def test_of_concurrent_jobs_that_name_one_location_one_is_accepted(service):
    client = service.client("mel")
    calls = [
        lambda name=f"job-{number}": client.submit([new(name, checkpoint="gs://bucket/run")])
        for number in range(8)
    ]
    together(*calls)
    assert len(live(service)) == 1


def test_two_jobs_of_one_call_cannot_name_one_location(service):
    jobs = [new("job-1", checkpoint="gs://b/run"), new("job-2", checkpoint="gs://b/run")]
    with pytest.raises(Conflict, match="in use by job job-1"):
        service.client("mel").submit(jobs)
    assert live(service) == []


def test_the_checkpoints_of_another_user_cannot_be_named(service):
    service.submit("job-1", by="mo")
    service.end_job("job-1")
    folder = f"{service.folder}/checkpoints"
    with pytest.raises(Forbidden, match="belongs to mo"):
        service.client("mel").submit([new("job-2", checkpoint=f"{folder}/job-1")])
    for location in (folder, f"{folder}/../secrets", f"{folder}/nobody"):
        with pytest.raises(BadInput, match="not the location of a job"):
            service.client("mel").submit([new("job-2", checkpoint=location)])
    service.client("mo").submit([new("job-3", checkpoint=f"{folder}/job-1")])


SPELLINGS = {
    "two slashes": "/{folder}/job-1",
    "three slashes": "//{folder}/job-1",
    "dots": "{folder}/./x/../job-1",
    "a folder in it": "{folder}/job-1/step_5",
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_no_spelling_leads_to_the_checkpoints_of_another_user(service, spelling):
    service.submit("job-1", by="mo")
    service.end_job("job-1")
    location = spelling.format(folder=service.folder / "checkpoints")
    with pytest.raises(Forbidden, match="belongs to mo"):
        service.client("mel").submit([new("job-2", checkpoint=location)])


def test_no_link_leads_to_the_checkpoints_of_another_user(service, tmp_path_factory):
    service.submit("job-1", by="mo")
    service.end_job("job-1")
    folder = service.folder / "checkpoints" / "job-1"
    folder.mkdir(parents=True)
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(folder)
    with pytest.raises(Forbidden, match="belongs to mo"):
        service.client("mel").submit([new("job-2", checkpoint=str(link))])
    with pytest.raises(BadInput, match=f"is a link; use {folder}"):
        service.client("mo").submit([new("job-2", checkpoint=str(link))])
    with pytest.raises(Forbidden, match="belongs to mo"):  # dots after a link
        service.client("mel").submit([new("job-2", checkpoint=f"{link}/../job-1")])


@pytest.mark.parametrize("root", ["/proc/self/root", "/proc/1/cwd/..", "//proc/thread-self/root"])
def test_a_location_that_depends_on_the_process_is_refused(service, root):
    service.submit("job-1", by="mo")
    service.end_job("job-1")
    location = f"{root}{service.folder}/checkpoints/job-1"
    with pytest.raises(BadInput, match="is a system folder"):
        service.client("mel").submit([new("job-2", checkpoint=location)])


def test_a_location_on_disk_in_use_is_refused_under_any_spelling(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    service.client("mel").submit([new("job-1", checkpoint=f"{folder}/run")])
    for location in (f"/{folder}/run", f"{folder}/./run/"):
        with pytest.raises(Conflict, match="in use by job job-1"):
            service.client("mo").submit([new("job-2", checkpoint=location)])


SYSTEM = [
    "/", "//", "/.", "/tmp/..", "/etc", "/etc/ck", "/usr/local/ck", "/bin", "/lib64/x", "/dev",
    "/dev/x", "/dev/shm", "/root", "/home", "/var", "/tmp", "/var/tmp/", "/boot/x", "/opt", "/srv/",
    "//mnt", "/media/.",
]  # fmt: skip


@pytest.mark.parametrize("location", SYSTEM)
def test_a_folder_of_the_system_is_no_checkpoint_location(service, location):
    with pytest.raises(BadInput, match="is a system folder; use another one"):
        service.client("mel").submit([new("job-1", checkpoint=location)])


@pytest.mark.parametrize(
    "location", ["/dev/shm/ck", "/mnt/disks/ck", "/home/mel/ck", "/tmp/ck", "/var/lib/ck", "/data"]
)
def test_a_folder_of_its_own_is_a_checkpoint_location(service, location):
    service.client("mel").submit([new("job-1", checkpoint=location)])


@pytest.mark.parametrize(
    "spelling", ["{state}", "{state}/", "{state}/x", "{state}/./logs", "{state}/..", "{link}"]
)
def test_the_state_of_the_server_is_no_checkpoint_location(service, spelling, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(service.folder)
    location = spelling.format(state=service.folder, link=link)
    with pytest.raises(BadInput, match="overlaps the state folder of the server"):
        service.client("mel").submit([new("job-1", checkpoint=location)])


# Whose a location is: a member must not block or overwrite that of another.


def run_and_end(service: ServiceHarness, job_id: str, by: str, location: str) -> None:
    service.submit(job_id, by=by, checkpoint=location)
    service.add_attempt(job_id, 0)
    service.end_job(job_id)


UNUSABLE = [
    "http://lab/run1", "https://lab/run1", "ftp://lab/x", "gs://../x", "gs://./x", "gs://x://lab",
    "gs://lab", "gs://lab/", "gs://lab//x", "gs://lab/mo/../mel/y", "gs://lab/./x", "gs://lab/x/..",
    "gs://lab/x//", "gs://lab/x://y", "gs://lab/x\n", "gs://lab/\x1b[2J", "/data/x\ny",
    "/data/\x7f",
]  # fmt: skip


@pytest.mark.parametrize("location", UNUSABLE)
def test_a_location_that_no_job_can_use_is_refused_whatever_submits_it(service, location):
    service.submit("job-1", by="mo")
    service.end_job("job-1")
    client = service.client("mo")
    for submit in (
        lambda: client.submit([new("job-2", checkpoint=location)]),
        lambda: client.check_jobs([new("job-2", checkpoint=location)]),
        lambda: client.rerun("job-1", changes={"checkpoint": location}),
        lambda: client.resume("job-1", changes={"checkpoint": location}),
    ):
        with pytest.raises(BadInput, match="checkpoint: "):
            submit()


def test_a_job_can_be_resumed_however_its_location_is_spelled(service):
    service.submit("job-1", by="mel", checkpoint="gs://lab/run1")
    service.end_job("job-1")
    job = service.store.job(JobId("job-1"))
    odd = "gs://lab//run1"
    service.change_job("job-1", spec=structs.replace(job.spec, checkpoint=odd), checkpoint=odd)
    service.client("mel").resume("job-1")


@pytest.mark.parametrize(
    "first, spelling",
    [
        ("gs://lab/run1", "gs://lab/run1"),
        ("gs://lab/run1", "gs://lab/run1/"),
        ("/data/run1", "//data/run1"),
        ("//data/run1", "/data/run1"),
        ("/data/run1", "///data/./x/../run1/"),
    ],
)
def test_a_location_belongs_to_the_user_whose_job_ran_there_first(service, first, spelling):
    run_and_end(service, "job-1", "mel", first)
    with pytest.raises(Forbidden, match="belongs to mel: job job-1 "):
        service.submit("job-2", by="mo", checkpoint=spelling)
    run_and_end(service, "job-3", "ada", spelling)  # an admin may
    service.submit("job-4", by="mel", checkpoint=spelling)


def test_a_rerun_does_not_lead_to_a_location_of_another_user(service):
    run_and_end(service, "job-1", "mel", "gs://lab/run1")
    service.submit("job-2", by="mo")
    service.end_job("job-2")
    with pytest.raises(Forbidden, match="belongs to mel"):
        service.client("mo").rerun("job-2", changes={"checkpoint": "gs://lab/run1"})


def test_the_folder_of_a_restart_from_scratch_belongs_to_the_owner_of_the_location(service):
    run_and_end(service, "job-1", "mel", "gs://lab/run1")
    for location in ("gs://lab/run1/from-attempt-1", "gs://lab/run1/from-attempt-1/from-attempt-2"):
        with pytest.raises(Forbidden, match="gs://lab/run1 belongs to mel"):
            service.submit("job-2", by="mo", checkpoint=location)
    service.submit("job-3", by="mel", checkpoint="gs://lab/run1/from-attempt-1")


def test_the_id_of_a_rerun_does_not_lead_to_the_checkpoints_of_another_user(service):
    service.submit("start-z1", by="mel")
    run_and_end(service, "job-1", "mel", "gs://lab/runs-2")
    mo = service.client("mo")
    service.submit("start", by="mo")
    service.end_job("start")
    root = service.store.job(JobId("start")).checkpoint.rpartition("/")[0]
    run_and_end(service, "inside", "mo", f"{root}/start")
    run_and_end(service, "outside", "mo", "gs://lab/runs")
    mo.rerun("inside", job_id=JobId("z1"))
    assert service.store.job(JobId("z1")).checkpoint == f"{root}/z1"
    with pytest.raises(Forbidden, match="gs://lab/runs-2 belongs to mel"):
        mo.rerun("outside", job_id=JobId("2"))
    mo.rerun("outside", job_id=JobId("z2"))
    assert service.store.job(JobId("z2")).checkpoint == "gs://lab/runs-z2"


def test_the_id_of_a_rerun_does_not_lead_to_the_state_of_the_server(service):
    start, _, end = str(service.folder).rpartition("-")  # of the folder of all tests
    run_and_end(service, "job-1", "mo", start)
    with pytest.raises(BadInput, match="overlaps the state folder of the server"):
        service.client("mo").rerun("job-1", job_id=JobId(end.split("/")[0]))


def test_a_job_that_never_ran_claims_nothing_after_its_end(service):
    service.submit("job-1", by="mo", checkpoint="gs://lab/run1")
    service.end_job("job-1")
    service.submit("job-2", by="mel", checkpoint="gs://lab/run1")


def test_a_folder_named_after_a_user_is_theirs(service):
    with pytest.raises(Forbidden, match="it is in a folder of mel"):
        service.submit("job-1", by="mo", checkpoint="gs://lab/mel/run1")
    with pytest.raises(Forbidden, match="it is in a folder of mel"):
        service.submit("job-1", by="mo", checkpoint="/home/mel/run1")
    service.submit("job-2", by="mel", checkpoint="gs://lab/mel/run1")
    service.submit("job-3", by="mo", checkpoint="gs://lab/mel/students/mo/run1")
    service.submit("job-4", by="ada", checkpoint="gs://lab/mel/run2")


def test_the_folder_of_a_user_is_theirs_under_any_spelling(service):
    for location in ("/home/mo/../mel/run1", "//home/mo/x/../../mel/run1"):
        with pytest.raises(Forbidden, match="it is in a folder of mel"):
            service.submit("job-1", by="mo", checkpoint=location)


def test_a_location_of_a_user_who_was_deleted_is_free(service):
    run_and_end(service, "job-1", "mo", "gs://lab/run1")
    service.client("ada").delete_user("mo")
    service.submit("job-2", by="mel", checkpoint="gs://lab/run1")


def test_nobody_else_uses_the_location_of_a_user(service):
    run_and_end(service, "job-1", "mo", "gs://lab/run1")
    with pytest.raises(Forbidden, match="ask mo or an admin"):
        service.submit("job-2", by="mel", checkpoint="gs://lab/run1")
    service.submit("job-2", by="ada", checkpoint="gs://lab/run1")


def test_a_request_that_waits_too_long_for_the_locations_is_told_to_retry(service, monkeypatch):
    monkeypatch.setattr(checkpoint_leases, "WAIT_SECONDS", 0.1)
    with (
        checkpoint_leases.exclusive(service.store, service.clock.now()),
        service.http(service.tokens["mel"]) as http,
    ):
        job = {"id": "job-1", "spec": {**SPEC, "checkpoint": "gs://lab/run1"}}
        answer = http.post("/jobs", json={"jobs": [job]})
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
        assert "checkpoint locations are busy" in answer.json()["error"]["message"]
    service.submit("job-1", checkpoint="gs://lab/run1")
