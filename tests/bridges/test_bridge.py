"""Documents of the collection, from a client's hands to their end and back."""

from __future__ import annotations

import os
import signal
from datetime import datetime

from tests.bridges.harness import ORDER, PROJECT, BridgeHarness
from tests.server_process import wait_until

SLOW = "print('at it', flush=True)\nimport time\ntime.sleep(600)"


def test_a_document_is_run_and_tells_all_that_became_of_it(world: BridgeHarness):
    world.start_bridge()
    name = world.add("logger.info('hello')\nresult = jnp.ones(challenge_number).sum()")
    found = world.wait_ended(name)
    assert (found["status"], found["result"], found["error"]) == ("completed", "3.0", None)
    times = [found[each] for each in ("created_at", "scheduled_at", "started_at", "completed_at")]
    assert all(isinstance(each, datetime) for each in (*times, found["updated_at"]))
    assert times[0] <= times[1] <= times[3] and times[2] <= times[3]
    assert found["updated_at"] >= times[3]
    # What the client wrote is as it was.
    assert found["metadata"] == {"submitted_by": "ada"}
    assert (found["challenge_number"], found["timeout"]) == (3, 60)
    job = world.server.client.job(found["bridge"]["job"])
    assert {"challenge=3", f"job-id={name}"} <= set(job.job.spec.tags)
    assert found["log_url"] == f"{world.server.url}/api/v1/jobs/{job.job.id}/logs"
    assert "hello" in "".join(world.server.client.logs(job.job.id))
    seen = world.observed_statuses(name)
    assert seen == sorted(seen, key=ORDER.index) and seen[0] == "pending"


def test_an_exception_ends_in_failed_with_its_traceback_and_is_not_run_again(world: BridgeHarness):
    world.start_bridge()
    found = world.wait_ended(world.add("def f():\n    raise ValueError('no luck')\nf()"))
    assert found["status"] == "failed" and found["result"] is None
    assert found["error"].startswith("ValueError: no luck\n\nTraceback (most recent call last):")
    assert found["completed_at"] >= found["started_at"]
    assert len(world.server.client.job(found["bridge"]["job"]).attempts) == 1


def test_a_timeout_is_enforced(world: BridgeHarness):
    world.start_bridge()
    code = "import time\nprint('began', time.time())\ntime.sleep(600)"
    found = world.wait_ended(world.add(code, timeout=1))
    assert found["error"] == "timeout: the code ran longer than 1 s and was stopped"
    log = "".join(world.server.client.logs(found["bridge"]["job"]))
    # How long it takes to end, and to tell so, is the machine's business; not ten minutes.
    assert 1 <= found["seconds"] < 60
    began = float(log.partition("began ")[2].split()[0])
    assert found["completed_at"].timestamp() - began < 120
    assert "Timeout (0:00:01)!" in log  # and where it stood


BAD = {
    "no challenge": ({"challenge_number": None}, "challenge_number: a whole number is needed"),
    "no code": ({"code": None}, "code: Python source is needed, as text"),
    "no number": ({"timeout": "soon"}, "timeout: a number of seconds is needed"),
    "negative": ({"timeout": -1}, "timeout: more than 0 and at most 604800 seconds"),
}


def test_a_document_that_nobody_could_run_fails_and_says_why(world: BridgeHarness):
    world.start_bridge()
    names = {kind: world.add("pass", **fields) for kind, (fields, _) in BAD.items()}
    for kind, (_, error) in BAD.items():
        found = world.wait_ended(names[kind])
        assert (found["status"], found["error"]) == ("failed", error)
        assert "bridge" not in found


def test_a_result_too_large_for_a_document_is_kept_elsewhere(world: BridgeHarness, tmp_path):
    world.start_bridge("--results", str(tmp_path / "results"))
    found = world.wait_ended(world.add("result = 'é' * 2_000_000"))
    assert found["status"] == "completed"
    assert found["result"].startswith("ééé") and len(found["result"]) < 2000
    path = tmp_path / "results" / f"{found['bridge']['job']}.txt"
    assert found["result_url"] == path.as_uri()
    assert path.read_text() == "é" * 2_000_000


def test_what_waited_is_run_and_a_document_whose_job_is_cancelled_fails(world: BridgeHarness):
    waiting, doomed = world.add("result = 1"), world.add(SLOW)
    world.start_bridge()
    assert world.wait_ended(waiting)["result"] == "1"
    job = world.wait_status(doomed, "running")["bridge"]["job"]
    world.server.client.cancel(job)
    found = world.wait_ended(doomed)
    assert found["status"] == "failed" and found["error"].startswith("cancelled: ")
    deleted = world.add(SLOW)
    job = world.wait_status(deleted, "running")["bridge"]["job"]
    world.documents.document(deleted).delete()
    wait_until(lambda: world.server.client.job(job).row.state == "cancelled", 30, world.diagnostics)


def test_a_client_may_ask_to_cancel_and_then_to_run_once_more(world: BridgeHarness):
    world.start_bridge()
    name = world.add(SLOW)
    world.wait_status(name, "running")
    world.documents.document(name).update({"cancel_requested": True})
    assert world.wait_ended(name)["error"].startswith("cancelled: ")
    world.documents.document(name).update(
        {"cancel_requested": False, "status": "pending", "code": "result = 'again'"}
    )
    found = wait_until(
        lambda: now if (now := world.get(name))["status"] == "completed" else None,
        60,
        world.diagnostics,
    )
    assert (found["result"], found["error"], found["bridge"]["run"]) == ("again", None, 1)


def test_a_dead_bridge_is_succeeded_by_another_that_runs_nothing_twice(world: BridgeHarness):
    first = world.start_bridge()
    name = world.add("import time\ntime.sleep(4)\nresult = 'whole'")
    before = world.wait_status(name, "running")["bridge"]
    world.kill(first)
    world.start_bridge()
    found = world.wait_ended(name)
    assert (found["status"], found["result"]) == ("completed", "whole")
    assert found["bridge"]["job"] == before["job"]
    assert found["bridge"]["fence"] == before["fence"] + 1
    assert len(world.server.client.job(before["job"]).attempts) == 1


def test_a_bridge_that_ends_in_good_order_is_succeeded_at_once(world: BridgeHarness):
    first = world.start_bridge()
    name = world.add(SLOW, timeout=8)
    world.wait_status(name, "running")
    first.terminate()
    assert first.wait(60) == 0
    assert list(world.user.collection(f"{world.documents.id}_bridges").stream()) == []
    world.start_bridge()
    assert world.wait_ended(name)["error"].startswith("timeout: ")


def test_a_preempted_job_is_run_again_and_completes(world: BridgeHarness, ledger):
    world.start_bridge()
    name = world.add(
        f"open({str(ledger)!r}, 'a').write('ran\\n')\n"
        "import time\ntime.sleep(5)\nresult = 'in the end'"
    )
    job = world.wait_status(name, "running")["bridge"]["job"]
    wait_until(lambda: ledger.read_text() == "ran\n", 30, world.diagnostics)
    (held,) = world.server.client.slices(job=job)
    world.server.client.inject_fault(held.id, "preempt")
    found = world.wait_ended(name)
    assert (found["status"], found["result"]) == ("completed", "in the end")
    assert ledger.read_text() == "ran\nran\n"
    assert world.observed_statuses(name) == ["pending", "scheduled", "running", "completed"]


FORGE = """
victim, project, collection, document, home, emulator = {}
import os, pathlib
seen = ' '.join(os.environ.values())
places = [v for k, v in os.environ.items() if k in ('TPUFLEET_RUN_DIR', 'TPUFLEET_CHECKPOINT_DIR')]
forged = '{{"status": "completed", "result": "forged", "error": null}}'
for place in places:
    for target in (pathlib.Path(place), pathlib.Path(place).parent / victim):
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
raise ValueError(f'{{got}}; emulator known: {{emulator in seen}}')
"""


def test_code_can_forge_neither_its_own_status_nor_that_of_another_document(world: BridgeHarness):
    world.start_bridge()
    victim = world.add(SLOW, timeout=20)
    job = world.wait_status(victim, "running")["bridge"]["job"]
    emulator = os.environ["FIRESTORE_EMULATOR_HOST"]
    told = (job, PROJECT, world.documents.id, victim, str(world.server.home), emulator)
    name = world.add(FORGE.format(told))
    found = world.wait_ended(name)
    assert found["status"] == "failed"
    first = found["error"].partition("\n")[0]
    assert "in;" not in first and first.endswith("emulator known: False")
    if "runs as root" not in "".join(world.server.client.logs(found["bridge"]["job"])):
        assert "read the token" not in first
    assert world.get(victim)["status"] == "running"
    assert world.wait_ended(victim)["error"].startswith("timeout: ")


def test_a_bridge_that_slept_while_another_took_over_changes_nothing(world: BridgeHarness):
    sleeper = world.start_bridge()
    name = world.add("import time\ntime.sleep(2)\nresult = 'by the other'")
    world.wait_status(name, "running")
    sleeper.send_signal(signal.SIGSTOP)
    other = world.start_bridge()
    found = world.wait_ended(name)
    assert (found["status"], found["bridge"]["fence"]) == ("completed", 1)
    world.kill(other)
    sleeper.send_signal(signal.SIGCONT)
    # It is awake again, and does its work.
    assert world.wait_ended(world.add("result = 'by the sleeper'"))["result"] == "by the sleeper"
    assert world.get(name) == found


def test_no_document_fails_because_the_control_plane_was_away(world: BridgeHarness):
    world.start_bridge()
    assert world.wait_ended(world.add("result = 'before'"))["result"] == "before"
    world.server.kill()
    name = world.add("result = 'after'")
    world.wait_status(name, "scheduled")
    world.server.start()
    assert world.wait_ended(name)["result"] == "after"
