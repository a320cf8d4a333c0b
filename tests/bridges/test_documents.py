"""The rules of documents: what is valid, who may claim, what goes forward."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tpufleet.bridges.firestore import documents, jobs, outcomes
from tpufleet.bridges.firestore.documents import CodeRequest, Document, DocumentStatus
from tpufleet.errors import BadInput
from tpufleet.model import job_file
from tpufleet.model.jobs import JobId

AT = datetime(2026, 1, 1, tzinfo=UTC)


def document(name: str = "d1", created: datetime = AT, **data: Any) -> Document:
    return Document(
        id=name,
        path=f"p/(default)/tpu_jobs/{name}",
        data=data,
        created_at=created,
        updated_at=created,
    )


def test_a_request_has_the_contracts_defaults():
    request = documents.parse_request({"code": "x", "challenge_number": 4})
    assert request == CodeRequest(code="x", challenge_number=4, timeout=300)


def test_every_fault_of_a_request_is_told_at_once():
    with pytest.raises(BadInput) as told:
        documents.parse_request({"code": "  ", "challenge_number": True, "timeout": float("nan")})
    assert [part.partition(":")[0] for part in str(told.value).split("; ")] == [
        "code",
        "challenge_number",
        "timeout",
    ]


def test_numbers_of_javascript_are_whole_when_they_look_so():
    assert documents.parse_request({"code": "x", "challenge_number": 4.0}).challenge_number == 4
    with pytest.raises(BadInput, match="challenge_number"):
        documents.parse_request({"code": "x", "challenge_number": 4.5})


def test_a_document_is_one_job_for_every_bridge_and_no_other_document_is_that_job():
    ids = {
        documents.next_claim(each, holder).job_id
        for holder in ("one", "two")
        for each in (document(status="pending"), document("d2", status="pending"))
    }
    assert len(ids) == 2
    again = document(created=AT + timedelta(seconds=1), status="pending")
    assert documents.next_claim(again, "one").job_id not in ids


def test_claims_are_numbered_by_hands_and_by_runs():
    waiting = document(status="pending")
    first = documents.next_claim(waiting, "one")
    assert (first.fence, first.run_number) == (0, 0)
    held = document(status="scheduled", bridge=first.to_fields())
    taken = documents.next_claim(held, "two")
    assert (taken.fence, taken.run_number, taken.job_id) == (1, 0, first.job_id)
    once_more = document(status="pending", bridge=taken.to_fields(), result="old", error="old")
    second = documents.next_claim(once_more, "one")
    assert (second.fence, second.run_number) == (2, 1) and second.job_id != first.job_id
    assert documents.claim_fields(once_more, second)["result"] is None


def test_a_claim_whose_answer_was_lost_is_found_and_nothing_is_written():
    claim = documents.next_claim(document(status="pending"), "one")
    ours = document(status="scheduled", bridge=claim.to_fields())
    assert documents.next_claim(ours, "one") == claim
    assert documents.claim_fields(ours, claim) == {}


def test_a_client_cannot_point_a_claim_at_the_job_of_another_document():
    claim = documents.next_claim(document(status="pending"), "one")
    forged = document(
        status="scheduled", bridge={**claim.to_fields(), "job": "fs-of-somebody-else"}
    )
    assert documents.next_claim(forged, "one").job_id == claim.job_id
    assert documents.next_claim(forged, "two").job_id == claim.job_id


@pytest.mark.parametrize("bridge", [None, 3, [], {}, {"holder": 1, "fence": "0"}], ids=repr)
def test_a_claim_that_no_bridge_wrote_is_none(bridge):
    assert documents.parse_claim({"bridge": bridge}) is None
    assert documents.next_claim(document(status="running", bridge=bridge), "one") is None


@pytest.mark.parametrize("before", list(DocumentStatus))
@pytest.mark.parametrize("after", list(DocumentStatus))
def test_a_status_only_goes_forward(before, after):
    order = list(DocumentStatus)
    allowed = order.index(after) > order.index(before) and before not in ("completed", "failed")
    assert documents.is_forward(before, after) == allowed


def test_the_room_for_a_result_shrinks_with_what_the_client_wrote():
    assert 900_000 < documents.max_result_bytes({"code": "x"}) < documents.MAX_DOCUMENT_BYTES
    assert documents.max_result_bytes({"code": "x" * documents.MAX_DOCUMENT_BYTES}) == 0


@pytest.mark.parametrize("name", ["abc", "_x", "ünï/cödé ", "x" * 400, "__", "-1"])
@pytest.mark.parametrize("challenge", [0, 7, -3, 10**40])
def test_every_document_makes_a_valid_job_file(tmp_path, name, challenge):
    offer = jobs.JobTemplate(accelerator="v5e-1", program_dir=tmp_path)
    request = CodeRequest(code="x", challenge_number=challenge, timeout=0.5)
    written = jobs.job_spec(offer, JobId("fs-abcdefghijkl"), name, request)
    assert job_file.parse_job(written).accelerator == "v5litepod-1"


NONSENSE = [b"", b"null", b"[]", b'{"status": 3}', b'{"status": "completed", "result": 7}', b"\xff"]


@pytest.mark.parametrize("handed", NONSENSE, ids=repr)
def test_nonsense_instead_of_an_outcome_is_a_failure(handed):
    outcome = outcomes.parse_result(handed)
    assert outcome.status is DocumentStatus.FAILED and "no outcome" in outcome.error


def test_an_outcome_can_say_no_more_than_completed_or_failed():
    forged = b'{"status": "pending", "result": "x", "bridge": {"holder": "me"}}'
    assert outcomes.parse_result(forged).status is DocumentStatus.FAILED
