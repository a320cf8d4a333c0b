"""Documents at Firestore's size limit, and documents that the former worker left behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytest.importorskip(
    "google.cloud.firestore", reason="no Firestore client; pip install 'tpufleet[firestore]'"
)

from google.api_core.exceptions import InvalidArgument

from tests.firestore.harness import PATIENCE, BridgeHarness
from tests.firestore.test_bridge import until_told
from tests.firestore.test_documents import document
from tpufleet_firestore.bridge import documents

LIMIT = documents.MAX_DOCUMENT_BYTES
# Bytes that the client leaves free, from none to more than a long result needs.
FREE_BYTES = (0, 60, 200, 400, 700, 1_200, 3_000, 5_000, 20_000, 60_000)
FEW_FREE_BYTES = (0, 400, 3_000, 60_000)


def padded_code(collection: str, free: int, code: str) -> str:
    """Code that fills a document of the harness up to `free` bytes."""
    fields = {
        "challenge_number": 3,
        "code": "",
        "timeout": 60,
        "status": "pending",
        "created_at": documents.SERVER_TIME,
        "metadata": {"submitted_by": "ada"},
    }
    empty = document("x" * 20, collection=collection, **fields)
    head = f"{code}\n#"
    return head + "x" * (LIMIT - documents.document_bytes(empty) - len(head) - free)


def largest_accepted(harness: BridgeHarness) -> int:
    """How many bytes the emulator, which counts a few more than Firestore, requires to be free."""
    for free in range(0, 500, 10):
        try:
            harness.add(padded_code(harness.documents.id, free, "pass"), status="completed")
        except InvalidArgument:
            continue
        return free
    raise AssertionError("the emulator rejects documents far below 1 MiB")


@pytest.mark.parametrize(
    "free_bytes",
    [
        pytest.param(FEW_FREE_BYTES, id="few"),
        pytest.param(FREE_BYTES, id="many", marks=pytest.mark.slow),
    ],
)
def test_documents_of_every_size_end(harness: BridgeHarness, free_bytes: tuple[int, ...]):
    collection = harness.documents.id
    smallest = largest_accepted(harness)
    names = {
        free: harness.add(padded_code(collection, free, "result = 'é' * 40_000"))
        for free in [smallest + more for more in free_bytes]
    }
    failing = harness.add(padded_code(collection, 5_000, "raise ValueError('é' * 40_000)"))
    harness.start_bridge()
    for free, name in names.items():
        found = harness.wait_ended(name)
        if free < documents.REQUIRED_FREE_BYTES:
            assert found["status"] == "failed", free
            full = free < smallest + 200
            assert full or found["error"].startswith("the document is too large: "), free
        else:
            assert (found["status"], found["error"]) == ("completed", None), free
            assert found["result"].startswith("ééé") and found["log_url"], free
            assert ("result_url" in found) == (free < 90_000), free
            if "result_url" in found:
                assert httpx.get(found["result_url"], timeout=900).json()["result"] == "é" * 40_000
    found = harness.wait_ended(failing)
    assert found["error"].startswith("ValueError: ééé") and found["log_url"]


@pytest.mark.slow
def test_documents_that_the_former_worker_left_behind_run(harness: BridgeHarness):
    left = {
        status: harness.add("result = 'in the end'", status=status, timeout=5)
        for status in ("scheduled", "running")
    }
    # Its worker may still be at it: the timeout has not passed.
    recent = harness.add("result = 1", status="running", timeout=600)
    harness.start_bridge("--adopt-after", "2s")
    for status, name in left.items():
        found = harness.wait_ended(name)
        assert (found["status"], found["result"]) == ("completed", "in the end"), status
        statuses = harness.observed_statuses(name)
        assert "pending" not in statuses and statuses[-1] == "completed"
    assert harness.get(recent)["status"] == "running" and "bridge" not in harness.get(recent)


@pytest.mark.slow
def test_a_document_that_grows_while_its_code_runs_ends(harness: BridgeHarness, ledger):
    harness.start_bridge()
    name = harness.add(until_told(ledger, "x" * 5_000), notes="")
    harness.wait_status(name, "running")
    reference = harness.documents.document(name)
    reference.update({"notes": "x" * 1_030_000}, retry=PATIENCE)
    size = documents.document_bytes(document(name, harness.documents.id, **harness.get(name)))
    free = LIMIT - size - largest_accepted(harness)
    reference.update({"notes": "x" * (1_030_000 + free)}, retry=PATIENCE)
    ledger.write_text("go\n")
    assert harness.wait_ended(name)["status"] == "failed"


SIZES: dict[str, tuple[dict[str, Any], int]] = {
    # From https://firebase.google.com/docs/firestore/storage-size: its example, with the task's
    # fields, in users/jeff/tasks/my_task_id; ours has the path tasks/my_task_id.
    "documented example": (
        {"type": "Personal", "done": False, "priority": 1, "description": "Learn Cloud Firestore"},
        (6 + 11 + 16) + (5 + 9) + (5 + 1) + (9 + 8) + (12 + 22) + 32,
    ),
    "unicode": ({"é": "é"}, 33 + 3 + 3 + 32),
    "nested": ({"m": {"a": None, "b": [1.5, b"abc"]}}, 33 + 2 + (2 + 1) + (2 + 8 + 3) + 32),
    "time": ({"t": documents.SERVER_TIME}, 33 + 2 + 8 + 32),
}


@pytest.mark.parametrize(("data", "size"), SIZES.values(), ids=SIZES)
def test_the_size_of_a_document_is_computed_as_documented(data, size):
    assert documents.document_bytes(document("my_task_id", "tasks", **data)) == size
