"""Documents of the collection, from submission to result."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.firestore.harness import ORDER, PATIENCE, PROJECT, BridgeHarness
from tests.server_process import wait_until

SLOW = "print('running', flush=True)\nimport time\ntime.sleep(600)"
# Runs until the ledger has a line.
UNTIL_TOLD = """
import os, time
while not os.path.getsize({path!r}):
    time.sleep(0.05)
result = {result!r}
"""


def until_told(ledger: Path, result: str) -> str:
    return UNTIL_TOLD.format(path=str(ledger), result=result)


def test_a_document_runs_and_receives_its_result(harness: BridgeHarness):
    harness.start_bridge()
    name = harness.add("logger.info('hello')\nresult = jnp.ones(challenge_number).sum()")
    found = harness.wait_ended(name)
    assert (found["status"], found["result"], found["error"]) == ("completed", "3.0", None)
    times = [found[name] for name in ("created_at", "scheduled_at", "started_at", "completed_at")]
    assert all(isinstance(time, datetime) for time in (*times, found["updated_at"]))
    assert times[0] <= times[1] <= times[3] and times[2] <= times[3]
    assert found["updated_at"] >= times[3]
    # What the client wrote is unchanged.
    assert found["metadata"] == {"submitted_by": "ada"}
    assert (found["challenge_number"], found["timeout"]) == (3, 600)
    job = harness.server.client.job(found["bridge"]["job"])
    assert {"challenge=3", f"job-id={name}"} <= set(job.job.spec.tags)
    # The author of the document has no token.
    assert found["log_url"].startswith(f"{harness.server.url}/api/v1/jobs/{job.job.id}/logs?")
    response = httpx.get(found["log_url"], timeout=900)
    assert (response.status_code, "hello" in response.text) == (200, True)
    assert "hello" in "".join(harness.server.client.logs(job.job.id))
    statuses = harness.observed_statuses(name)
    # A listener may miss some: the emulator sends the latest of several changes.
    assert statuses == sorted(statuses, key=ORDER.index) and statuses[-1] == "completed"


# What clients of the former worker write besides `status` and `created_at`, and what they read.
DOCUMENTS = [
    ({"challenge_number": 1, "timeout": 60, "metadata": {"submitted_by": "test_script"},
      "code": "x = jnp.ones((100, 100))\nlogger.info('multiplying')\n"
      "result = float(jnp.dot(x, x).sum())"},
     "completed", "1000000.0"),
    ({"code": "result = challenge_number * 2", "timeout": None, "metadata": None},
     "completed", "6"),
    ({"code": "result = f'challenge {challenge_number}'", "challenge_number": 4.0,
      "timeout": 30.0}, "completed", "challenge 4"),
    ({"code": "result = [d.platform for d in jax.devices()][:0]\nprint('no devices')"},
     "completed", "[]"),
    ({"code": "print(undefined)"}, "failed", None),
]  # fmt: skip


@pytest.mark.slow
def test_five_documents_of_former_clients_end_as_they_did(harness: BridgeHarness):
    harness.start_bridge()
    names = [harness.add("", **document) for document, *_ in DOCUMENTS]
    for name, (_, status, result) in zip(names, DOCUMENTS, strict=True):
        found = harness.wait_ended(name)
        assert (found["status"], found["result"]) == (status, result), found
        assert status == "completed" or found["error"].startswith("NameError: name 'undefined'")


def test_an_exception_fails_the_document_with_its_traceback_and_is_not_retried(
    harness: BridgeHarness,
):
    harness.start_bridge()
    found = harness.wait_ended(harness.add("def f():\n    raise ValueError('no luck')\nf()"))
    assert found["status"] == "failed" and found["result"] is None
    assert found["error"].startswith("ValueError: no luck\n\nTraceback (most recent call last):")
    assert found["completed_at"] >= found["started_at"]
    job = found["bridge"]["job"]
    ended = wait_until(
        lambda: now if (now := harness.server.client.job(job)).row.ended_at else None,
        60,
        harness.diagnostics,
    )
    assert len(ended.attempts) == 1
    # The job says the same as its document.
    assert ended.row.state == "failed" and "ValueError: no luck" in ended.row.reason
    assert "ValueError: no luck" in harness.server.client.why(job).message


@pytest.mark.slow
@pytest.mark.parametrize("line", ["UNAVAILABLE: failed to connect", "No space left on device"])
def test_code_that_prints_infrastructure_errors_is_not_retried(harness: BridgeHarness, line):
    harness.start_bridge()
    found = harness.wait_ended(harness.add(f"raise OSError({line!r})"))
    assert found["error"].startswith(f"OSError: {line}")
    job = found["bridge"]["job"]
    wait_until(
        lambda: harness.server.client.job(job).row.state == "failed", 60, harness.diagnostics
    )
    assert len(harness.server.client.job(job).attempts) == 1


@pytest.mark.slow
def test_a_timeout_is_enforced(harness: BridgeHarness):
    harness.start_bridge()
    code = "import time\nprint('started', time.time())\ntime.sleep(600)"
    found = harness.wait_ended(harness.add(code, timeout=5))
    assert found["error"] == "timeout: the code ran longer than 5 s and was stopped"
    log = "".join(harness.server.client.logs(found["bridge"]["job"]))
    # Generous bounds for a busy machine, but far from the ten minutes of the sleep.
    assert 5 <= found["seconds"] < 60
    started = float(log.partition("started ")[2].split()[0])
    assert found["completed_at"].timestamp() - started < 120
    assert "Timeout (0:00:05)!" in log  # and the stack of the code


INVALID = {
    "no challenge": ({"challenge_number": None}, "challenge_number: expected a whole number"),
    "no code": ({"code": None}, "code: expected Python source as text"),
    "no number": ({"timeout": "soon"}, "timeout: expected a number above 0"),
    "negative": ({"timeout": -1}, "timeout: expected a number above 0"),
}


def test_an_invalid_document_fails_with_the_reason(harness: BridgeHarness):
    harness.start_bridge()
    names = {kind: harness.add("pass", **fields) for kind, (fields, _) in INVALID.items()}
    for kind, (_, error) in INVALID.items():
        found = harness.wait_ended(names[kind])
        assert found["status"] == "failed" and found["error"].startswith(error)
        assert "bridge" not in found


@pytest.mark.slow
def test_pending_documents_run_and_cancelled_or_deleted_ones_end(harness: BridgeHarness):
    pending, cancelled = harness.add("result = 1"), harness.add(SLOW)
    harness.start_bridge()
    assert harness.wait_ended(pending)["result"] == "1"
    job = harness.wait_status(cancelled, "running")["bridge"]["job"]
    harness.server.client.cancel(job)
    found = harness.wait_ended(cancelled)
    assert found["status"] == "failed" and found["error"].startswith("cancelled: ")
    deleted = harness.add(SLOW)
    job = harness.wait_status(deleted, "running")["bridge"]["job"]
    harness.documents.document(deleted).delete(retry=PATIENCE)
    wait_until(
        lambda: harness.server.client.job(job).row.state == "cancelled", 30, harness.diagnostics
    )


@pytest.mark.slow
def test_a_client_can_cancel_and_rerun_a_document(harness: BridgeHarness):
    harness.start_bridge()
    name = harness.add(SLOW)
    harness.wait_status(name, "running")
    harness.documents.document(name).update({"cancel_requested": True}, retry=PATIENCE)
    assert harness.wait_ended(name)["error"].startswith("cancelled: ")
    harness.documents.document(name).update(
        {"cancel_requested": False, "status": "pending", "code": "result = 'again'"}
    )
    found = wait_until(
        lambda: now if (now := harness.get(name))["status"] == "completed" else None,
        60,
        harness.diagnostics,
    )
    assert (found["result"], found["error"], found["bridge"]["run"]) == ("again", None, 1)


def test_a_bridge_takes_over_from_a_dead_one_without_rerunning_code(harness: BridgeHarness, ledger):
    first = harness.start_bridge()
    name = harness.add(until_told(ledger, "whole"))
    before = harness.wait_status(name, "running")["bridge"]
    harness.kill(first)
    harness.start_bridge()
    ledger.write_text("go\n")
    found = harness.wait_ended(name)
    assert (found["status"], found["result"]) == ("completed", "whole")
    assert found["bridge"]["job"] == before["job"]
    assert found["bridge"]["fence"] == before["fence"] + 1
    assert len(harness.server.client.job(before["job"]).attempts) == 1


@pytest.mark.slow
def test_a_bridge_takes_over_at_once_from_one_that_was_stopped(harness: BridgeHarness):
    first = harness.start_bridge()
    name = harness.add(SLOW, timeout=8)
    harness.wait_status(name, "running")
    first.terminate()
    assert first.wait(900) == 0
    assert list(harness.user.collection(f"{harness.documents.id}_bridges").stream()) == []
    harness.start_bridge()
    assert harness.wait_ended(name)["error"].startswith("timeout: ")


@pytest.mark.slow
def test_a_preempted_job_runs_again_and_completes(harness: BridgeHarness, ledger):
    harness.start_bridge()
    name = harness.add(
        f"open({str(ledger)!r}, 'a').write('ran\\n')\n"
        "import time\ntime.sleep(5)\nresult = 'in the end'"
    )
    job = harness.wait_status(name, "running")["bridge"]["job"]
    wait_until(lambda: ledger.read_text() == "ran\n", 30, harness.diagnostics)
    (held,) = harness.server.client.slices(job=job)
    harness.server.client.inject_fault(held.id, "preempt")
    found = harness.wait_ended(name)
    assert (found["status"], found["result"]) == ("completed", "in the end")
    assert ledger.read_text() == "ran\nran\n"
    statuses = harness.observed_statuses(name)
    assert statuses == sorted(statuses, key=ORDER.index) and statuses[-1] == "completed"


FORGE = """
victim, project, collection, document, home, emulator = {}
import os, pathlib
values = ' '.join(os.environ.values())
folders = [v for k, v in os.environ.items() if k in ('TPUFLEET_RUN_DIR', 'TPUFLEET_CHECKPOINT_DIR')]
forged = '{{"status": "completed", "result": "forged", "error": null}}'
for folder in folders:
    for target in (pathlib.Path(folder), pathlib.Path(folder).parent / victim):
        for name in ('result', 'outcome.json'):
            try:
                target.mkdir(parents=True, exist_ok=True)
                (target / name).write_text(forged)
            except OSError:
                pass
try:
    from google.cloud import firestore
    other = firestore.Client(project=project).collection(collection).document(document)
    other.update(dict(status='completed', result='forged'))
    got = 'in'
except BaseException as error:
    got = type(error).__name__
try:
    (pathlib.Path(home) / 'token').read_text()
    got += ' and read the token'
except OSError:
    pass
raise ValueError(f'{{got}}; emulator known: {{emulator in values}}')
"""


@pytest.mark.slow
def test_code_cannot_forge_the_status_of_any_document(harness: BridgeHarness):
    harness.start_bridge()
    victim = harness.add(SLOW)
    job = harness.wait_status(victim, "running")["bridge"]["job"]
    emulator = os.environ["FIRESTORE_EMULATOR_HOST"]
    arguments = (job, PROJECT, harness.documents.id, victim, str(harness.server.home), emulator)
    name = harness.add(FORGE.format(arguments))
    found = harness.wait_ended(name)
    assert found["status"] == "failed"
    first = found["error"].partition("\n")[0]
    assert "in;" not in first and first.endswith("emulator known: False")
    if "running the code as root" not in "".join(
        harness.server.client.logs(found["bridge"]["job"])
    ):
        assert "read the token" not in first
    assert harness.get(victim)["status"] == "running"
    harness.server.client.cancel(job)
    assert harness.wait_ended(victim)["error"].startswith("cancelled: ")


@pytest.mark.slow
def test_a_suspended_bridge_changes_nothing_after_a_takeover(harness: BridgeHarness, ledger):
    sleeper = harness.start_bridge()
    name = harness.add(until_told(ledger, "by the other"))
    harness.wait_status(name, "running")
    sleeper.send_signal(signal.SIGSTOP)
    ledger.write_text("go\n")
    other = harness.start_bridge()
    found = harness.wait_ended(name)
    assert (found["status"], found["bridge"]["fence"]) == ("completed", 1)
    harness.kill(other)
    sleeper.send_signal(signal.SIGCONT)
    # It is running again, and serves new documents.
    assert (
        harness.wait_ended(harness.add("result = 'by the sleeper'"))["result"] == "by the sleeper"
    )
    assert harness.get(name) == found


@pytest.mark.slow
def test_no_document_fails_while_the_control_plane_is_down(harness: BridgeHarness):
    harness.start_bridge()
    assert harness.wait_ended(harness.add("result = 'before'"))["result"] == "before"
    harness.server.kill()
    name = harness.add("result = 'after'")
    harness.wait_status(name, "scheduled")
    harness.server.start()
    assert harness.wait_ended(name)["result"] == "after"
