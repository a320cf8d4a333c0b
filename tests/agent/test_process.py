"""The agent as the process that it is: signals, sudden death, restart, start-up."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil

from tests.agent.control_plane import wait_until
from tests.agent.test_stopping import DAEMON, PATIENT
from tpufleet.agent import main
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import NoticeKind, Phase


def test_sigterm_stops_the_program_tells_the_end_and_leaves(world):
    world.assign_python(PATIENT)
    agent = world.start_process()
    world.shows("up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0
    exit = world.exit()
    assert (exit.status, exit.stopped_by_us) == (0, True)
    assert "saving\n" in world.log()
    assert world.processes() == []


def test_in_a_pod_sigterm_is_a_notice_and_the_host_leaves_as_one_whose_work_is_not_done(world):
    world.assign_python(PATIENT)
    agent = world.start_process(TPUFLEET_SIGTERM_MEANS="preempted")
    world.shows("up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 128 + signal.SIGTERM
    assert "saving\n" in world.log()
    told = [beat for beat in world.plane.beats if beat.notice is NoticeKind.PREEMPTED]
    assert told and told[0].phase is not Phase.EXITED  # at once, not with the end


def test_a_pod_that_holds_more_than_it_may_is_ended_for_that_and_not_preempted(world, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "big").write_bytes(b"x" * 3 * 2**20)
    world.assign_python(PATIENT)
    agent = world.start_process(
        TPUFLEET_SIGTERM_MEANS="preempted",
        TPUFLEET_SCRATCH=str(scratch),
        TPUFLEET_SCRATCH_BYTES=str(2**20),
    )
    world.shows("up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 128 + signal.SIGTERM
    exit = world.exit()
    assert (exit.evidence, exit.stopped_by_us) == (EndReason.DISK_FULL, False)
    assert "holds 3 MiB, and may hold 1 MiB" in exit.line
    assert not [beat for beat in world.plane.beats if beat.notice]


def test_a_program_does_not_outlive_an_agent_that_is_killed_nor_run_twice(world):
    world.assign_python(
        DAEMON + "daemon(True); print('up', flush=True)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_IGN); time.sleep(60)"
    )
    agent = world.start_process()
    world.shows("up\n")
    wait_until(lambda: len(world.processes()) == 2)
    family = psutil.Process(agent.pid).children(recursive=True)
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(_lives(process) for process in family), within=60)
    assert world.processes() == []

    boot = world.plane.beats[-1].boot
    world.start_process()
    exit = world.exit()
    assert exit.stopped_by_us and not exit.clean
    assert "restarted" in exit.line
    assert world.plane.beats[-1].boot != boot
    assert world.log().count("up\n") == 1


def test_an_agent_that_starts_ends_what_an_earlier_one_left(world):
    orphan = subprocess.Popen(
        ["sleep", "60"], env={"TPUFLEET_RUN_DIR": str(world.work / "j0.0" / "run")}
    )
    bystander = subprocess.Popen(["sleep", "60"], env={"TPUFLEET_RUN_DIR": "/elsewhere/run"})
    try:
        world.start_process()
        assert orphan.wait(60) == -signal.SIGKILL
        wait_until(lambda: world.plane.beats)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_program_gets_its_place_and_no_credential(world):
    world.assign_python(
        "import json, os; print('ENV', json.dumps(dict(os.environ)))", env={"MODE": "x"}
    )
    world.start_process(HF_HOME="/cache", OTHER=f"Bearer {world.plane.token}")
    world.exit()
    line = next(line for line in world.log().splitlines() if line.startswith("ENV "))
    environ = json.loads(line.removeprefix("ENV "))
    assert environ["MODE"] == "x" and environ["HF_HOME"] == "/cache"
    assert environ["JAX_PLATFORMS"] == "cpu" and environ["JAX_NUM_CPU_DEVICES"] == "4"
    assert environ["TPUFLEET_RUN_DIR"] == str(world.run_dir())
    assert world.plane.token not in line and world.plane.url not in line
    assert not {"TPUFLEET_SERVER", "TPUFLEET_TOKEN_FILE", "TPUFLEET_SLICE"} & environ.keys()


def test_a_missing_setting_is_named(capsys):
    assert main.run({"TPUFLEET_SERVER": "http://127.0.0.1:1"}) == main.EXIT_BAD_SETTINGS
    assert "TPUFLEET_SLICE is not set" in capsys.readouterr().err


def test_the_agent_loads_nothing_heavy(world):
    heavy = {"rich", "starlette", "uvicorn", "click", "yaml", "jax", "numpy"}
    world.plane.release = True
    agent = world.start_process(then=f"print(sorted({heavy} & sys.modules.keys()))")
    output, _ = agent.communicate(timeout=60)
    assert (agent.returncode, output) == (0, b"[]\n")


def test_an_agent_reports_that_it_is_idle_until_there_is_work(world):
    world.start_process()
    beat = wait_until(lambda: world.plane.beats and world.plane.beats[0])
    assert (beat.phase, beat.attempt_id, beat.exit) == (Phase.IDLE, None, None)
    assert (beat.host_id, beat.address, beat.coordinator_port) == ("s1/0", "127.0.0.1", 8476)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
