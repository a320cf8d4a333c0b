"""Rules for documents: validation, claims, and the order of statuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import JobId
from tpufleet_firestore.bridge import documents, jobs, outcomes
from tpufleet_firestore.bridge.documents import CodeRequest, Document, DocumentStatus

AT = datetime(2026, 1, 1, tzinfo=UTC)


def document(
    name: str = "d1",
    collection: str = "tpu_jobs",
    created: datetime = AT,
    age: timedelta = timedelta(0),
    **data: Any,
) -> Document:
    return Document(
        id=name,
        path=f"p/(default)/{collection}/{name}",
        data=data,
        created_at=created,
        updated_at=created,
        read_at=created + age,
    )


def test_a_request_has_the_documented_defaults():
    request = documents.parse_request({"code": "x", "challenge_number": 4})
    assert request == CodeRequest(code="x", challenge_number=4, timeout=300)


def test_all_errors_of_a_request_are_reported_together():
    with pytest.raises(BadInput) as raised:
        documents.parse_request({"code": "  ", "challenge_number": True, "timeout": float("nan")})
    assert [part.partition(":")[0] for part in str(raised.value).split("; ")] == [
        "code",
        "challenge_number",
        "timeout",
    ]


def test_integral_floats_from_javascript_are_accepted():
    assert documents.parse_request({"code": "x", "challenge_number": 4.0}).challenge_number == 4
    with pytest.raises(BadInput, match="challenge_number"):
        documents.parse_request({"code": "x", "challenge_number": 4.5})


def test_a_document_maps_to_one_job_whichever_bridge_claims_it():
    ids = {
        documents.next_claim(each, holder).job_id
        for holder in ("one", "two")
        for each in (document(status="pending"), document("d2", status="pending"))
    }
    assert len(ids) == 2
    again = document(created=AT + timedelta(seconds=1), status="pending")
    assert documents.next_claim(again, "one").job_id not in ids


def test_the_fence_grows_with_takeovers_and_the_run_number_with_reruns():
    first = documents.next_claim(document(status="pending"), "one")
    assert (first.fence, first.run_number) == (0, 0)
    held = document(status="scheduled", bridge=first.to_fields())
    takeover = documents.next_claim(held, "two")
    assert (takeover.fence, takeover.run_number, takeover.job_id) == (1, 0, first.job_id)
    rerun = document(status="pending", bridge=takeover.to_fields(), result="old", error="old")
    second = documents.next_claim(rerun, "one")
    assert (second.fence, second.run_number) == (2, 1) and second.job_id != first.job_id
    assert documents.claim_fields(rerun, second)["result"] is None


def test_repeating_a_claim_writes_nothing():
    claim = documents.next_claim(document(status="pending"), "one")
    claimed = document(status="scheduled", bridge=claim.to_fields())
    assert documents.next_claim(claimed, "one") == claim
    assert documents.claim_fields(claimed, claim) == {}


FORGED = {
    "a holder that is no ID": {"holder": ".."},
    "no holder": {"holder": ""},
    "a holder in another collection": {"holder": "a/b"},
    "a reserved holder": {"holder": "__all__"},
    "a holder that is too long": {"holder": "x" * 1500},
    "a fence that cannot grow": {"fence": 2**63 - 1},
    "a negative run": {"run": -1},
    "another type": {"fence": "1"},
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_claim_is_none_and_a_request_with_it_is_rejected(change):
    claim = documents.next_claim(document(status="pending"), "one").to_fields()
    request = {"code": "x", "challenge_number": 4, "status": "pending"}
    documents.parse_request({**request, "bridge": claim})
    forged = {**request, "bridge": claim | change}
    assert documents.parse_claim(forged) is None
    with pytest.raises(BadInput, match="bridge: is written by the bridge only"):
        documents.parse_request(forged)


@pytest.mark.parametrize("status", ["pending", "scheduled", "running"])
@pytest.mark.parametrize("field", ["fence", "run"])
def test_the_claim_after_the_largest_valid_one_is_valid(status, field):
    """Else the bridge takes its own claim for none, and lets go of the job that it started."""
    before = {"holder": "dead", "fence": 0, "run": 0, "job": "fs-1"}
    largest = document(status=status, bridge={**before, field: documents.MAX_COUNT})
    claim = documents.next_claim(largest, "one")
    assert documents.parse_claim({"bridge": claim.to_fields()}) == claim != largest.claim
    assert ("result" in documents.claim_fields(largest, claim)) == (status == "pending")


def test_a_client_cannot_point_a_claim_at_another_documents_job():
    claim = documents.next_claim(document(status="pending"), "one")
    forged = document(status="scheduled", bridge={**claim.to_fields(), "job": "fs-other"})
    assert documents.next_claim(forged, "one").job_id == claim.job_id
    assert documents.next_claim(forged, "two").job_id == claim.job_id


@pytest.mark.parametrize("bridge", [None, 3, [], {}, {"holder": 1, "fence": "0"}], ids=repr)
def test_an_invalid_claim_is_ignored(bridge):
    assert documents.parse_claim({"bridge": bridge}) is None


LEFT = {
    "scheduled": ("scheduled", timedelta(minutes=16), None, True),
    "running": ("running", timedelta(minutes=16), None, True),
    "within its timeout": ("running", timedelta(minutes=14), None, False),
    "pending": ("pending", timedelta(minutes=16), None, False),
    "ended": ("failed", timedelta(days=16), None, False),
    "held": ("running", timedelta(days=16), "one", False),
}


@pytest.mark.parametrize(("status", "age", "holder", "abandoned"), LEFT.values(), ids=LEFT)
def test_a_document_without_a_claim_is_abandoned_after_its_timeout(status, age, holder, abandoned):
    claim = {"holder": holder, "fence": 0, "run": 0, "job": "fs-1"} if holder else None
    left = document(status=status, age=age, bridge=claim, timeout=300)
    assert documents.is_abandoned(left, timedelta(minutes=10)) == abandoned
    if abandoned:
        taken = documents.next_claim(left, "one")
        assert (taken.fence, taken.run_number) == (0, 0)
        assert "status" not in documents.claim_fields(left, taken)


@pytest.mark.parametrize("before", list(DocumentStatus))
@pytest.mark.parametrize("after", list(DocumentStatus))
def test_a_status_only_moves_forward(before, after):
    order = list(DocumentStatus)
    allowed = order.index(after) > order.index(before) and before not in ("completed", "failed")
    assert documents.is_forward(before, after) == allowed


def test_the_maximum_result_size_shrinks_with_the_clients_data():
    small, full = document(code="x"), document(code="x" * documents.MAX_DOCUMENT_BYTES)
    assert 1_000_000 < documents.max_text_bytes(small) < documents.MAX_DOCUMENT_BYTES
    assert documents.max_text_bytes(full) == 0
    # What the bridge itself wrote will be replaced.
    rerun = document(code="x", result="y" * 500_000, error="z")
    assert documents.max_text_bytes(rerun) == documents.max_text_bytes(small)


@pytest.mark.parametrize("name", ["abc", "_x", "ünï/cödé ", "x" * 400, "__", "-1"])
@pytest.mark.parametrize("challenge", [0, 7, -3, 10**40])
def test_every_document_gives_a_valid_job_file(tmp_path, name, challenge):
    template = jobs.JobTemplate(accelerator="v5e-1", program_dir=tmp_path)
    request = CodeRequest(code="x", challenge_number=challenge, timeout=0.5)
    spec = jobs.job_spec(template, JobId("fs-abcdefghijkl"), name, request)
    assert job_file.parse_job(spec).accelerator == "v5litepod-1"


INVALID_FILES = [
    b"",
    b"null",
    b"[]",
    b'{"status": 3}',
    b'{"status": "completed", "result": 7}',
    b"\xff",
]


@pytest.mark.parametrize("data", INVALID_FILES, ids=repr)
def test_an_invalid_result_file_is_a_failure(data):
    outcome = outcomes.parse_result(data)
    assert outcome.status is DocumentStatus.FAILED and "result file" in outcome.error


def test_a_result_file_can_only_complete_or_fail_the_document():
    forged = b'{"status": "pending", "result": "x", "bridge": {"holder": "me"}}'
    assert outcomes.parse_result(forged).status is DocumentStatus.FAILED
