"""The agent as a process: signals, SIGKILL, restart, start-up."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil

from tests.agent.test_stopping import DAEMON, PATIENT
from tests.polling import wait_until
from tpufleet.agent import main
from tpufleet.model.fleet.hosts import NoticeKind, Phase
from tpufleet.model.job.end_reasons import EndReason


def test_sigterm_stops_the_program_and_reports_its_exit(harness):
    harness.assign_python(PATIENT)
    agent = harness.start_process()
    harness.wait_for_log("up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(900) == 0
    exit = harness.wait_for_exit()
    assert (exit.status, exit.stopped_by_agent) == (0, True)
    assert "saving\n" in harness.log()
    assert harness.processes() == []


def test_in_a_pod_sigterm_is_a_preemption_notice_and_the_exit_status_is_143(harness):
    harness.assign_python(PATIENT)
    agent = harness.start_process(TPUFLEET_SIGTERM_MEANS="preempted")
    harness.wait_for_log("up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(900) == 128 + signal.SIGTERM
    assert "saving\n" in harness.log()
    notices = [
        heartbeat
        for heartbeat in harness.control_plane.heartbeats
        if heartbeat.notice is NoticeKind.PREEMPTED
    ]
    assert notices and notices[0].phase is not Phase.EXITED  # immediately, not with the exit


def test_a_pod_over_its_disk_limit_fails_with_disk_full(harness, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "big").write_bytes(b"x" * 3 * 2**20)
    harness.assign_python(PATIENT)
    agent = harness.start_process(
        TPUFLEET_SIGTERM_MEANS="preempted",
        TPUFLEET_SCRATCH=str(scratch),
        TPUFLEET_SCRATCH_BYTES=str(2**20),
    )
    harness.wait_for_log("up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(900) == 128 + signal.SIGTERM
    exit = harness.wait_for_exit()
    assert (exit.evidence, exit.stopped_by_agent) == (EndReason.DISK_FULL, False)
    assert "uses 3 MiB, more than its limit of 1 MiB" in exit.log_line
    assert not [heartbeat for heartbeat in harness.control_plane.heartbeats if heartbeat.notice]


def test_a_killed_agent_takes_its_program_down_and_it_does_not_run_twice(harness):
    harness.assign_python(
        DAEMON + "daemon(True); print('up', flush=True)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_IGN); time.sleep(60)"
    )
    agent = harness.start_process()
    harness.wait_for_log("up\n")
    wait_until(lambda: len(harness.programs()) == 2)
    family = psutil.Process(agent.pid).children(recursive=True)
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(_is_running(process) for process in family), timeout=900)
    assert harness.processes() == []

    boot = harness.control_plane.heartbeats[-1].boot
    harness.start_process()
    exit = harness.wait_for_exit()
    assert exit.stopped_by_agent and not exit.clean
    assert "restarted" in exit.log_line
    assert harness.control_plane.heartbeats[-1].boot != boot
    assert harness.log().count("up\n") == 1


def test_a_new_agent_kills_processes_of_an_earlier_one(harness):
    orphan = subprocess.Popen(
        ["sleep", "60"], env={"TPUFLEET_RUN_DIR": str(harness.work / "j0.0" / "run")}
    )
    bystander = subprocess.Popen(["sleep", "60"], env={"TPUFLEET_RUN_DIR": "/elsewhere/run"})
    try:
        harness.start_process()
        assert orphan.wait(900) == -signal.SIGKILL
        wait_until(lambda: harness.control_plane.heartbeats)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_program_gets_its_environment_and_no_credentials(harness):
    harness.assign_python(
        "import json, os; print('ENV', json.dumps(dict(os.environ)))", env={"MODE": "x"}
    )
    harness.start_process(HF_HOME="/cache", OTHER=f"Bearer {harness.control_plane.token}")
    harness.wait_for_exit()
    line = next(line for line in harness.log().splitlines() if line.startswith("ENV "))
    environ = json.loads(line.removeprefix("ENV "))
    assert environ["MODE"] == "x" and environ["HF_HOME"] == "/cache"
    assert environ["JAX_PLATFORMS"] == "cpu" and environ["JAX_NUM_CPU_DEVICES"] == "4"
    assert environ["TPUFLEET_RUN_DIR"] == str(harness.run_dir())
    assert harness.control_plane.token not in line and "TPUFLEET_SLICE" not in environ
    # The token of the attempt, which can do less than that of the slice.
    assert Path(environ["TPUFLEET_TOKEN_FILE"]).parent == harness.run_dir()


def test_a_missing_setting_is_named(capsys):
    assert main.run({"TPUFLEET_SERVER": "http://127.0.0.1:1"}) == main.EXIT_BAD_SETTINGS
    assert "TPUFLEET_SLICE is not set" in capsys.readouterr().err


def test_the_agent_imports_no_heavy_modules(harness):
    heavy = {"rich", "starlette", "uvicorn", "click", "yaml", "jax", "numpy"}
    harness.control_plane.release = True
    agent = harness.start_process(then=f"print(sorted({heavy} & sys.modules.keys()))")
    output, _ = agent.communicate(timeout=900)
    assert (agent.returncode, output) == (0, b"[]\n")


def test_an_agent_without_assignment_reports_idle(harness):
    harness.start_process()
    heartbeat = wait_until(
        lambda: harness.control_plane.heartbeats and harness.control_plane.heartbeats[0]
    )
    assert (heartbeat.phase, heartbeat.attempt_id, heartbeat.exit) == (Phase.IDLE, None, None)
    assert (heartbeat.host_id, heartbeat.address, heartbeat.coordinator_port) == (
        "s1/0",
        "127.0.0.1",
        8476,
    )


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
