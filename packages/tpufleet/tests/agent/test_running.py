"""Running an assignment: code, setup, command, output, environment."""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
import tarfile
from datetime import timedelta

import pytest

from tests.polling import wait_until
from tpufleet.agent.workload.attempt_folder import AttemptFolder
from tpufleet.model.fleet.hosts import MAX_HEARTBEAT_POINTS, Phase
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.end_reasons import EndReason


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_setup_and_command_run_in_the_code_folder_and_their_output_is_in_order(harness):
    harness.control_plane.snapshots["d1"] = archive(
        train_py="print('training', open('prepared').read())"
    )
    harness.assign(
        sys.executable,
        "train.py",
        setup=("sh", "-c", "echo preparing; echo x > prepared"),
        snapshot="d1",
    )
    harness.start()
    exit = harness.wait_for_exit()
    assert (
        exit.clean and not exit.stopped_by_agent and exit.evidence is None and exit.log_line == ""
    )
    lines = harness.log().splitlines()
    assert lines[0] == "[tpufleet] setup: sh -c 'echo preparing; echo x > prepared'"
    assert lines[1] == "preparing"
    assert lines[2].startswith("[tpufleet] exited with status 0 after ")
    assert lines[3].startswith("[tpufleet] command: ")
    assert lines[4] == "training x"
    assert lines[-1].startswith("[tpufleet] exited with status 0 after ")


def test_the_phases_are_reported_in_order(harness):
    harness.assign("sh", "-c", "sleep 2", setup=("sh", "-c", "sleep 2"))
    harness.start()
    harness.wait_for_exit()
    phases = [heartbeat.phase for heartbeat in harness.control_plane.heartbeats]
    assert sorted(set(phases), key=phases.index) == [
        Phase.IDLE,
        Phase.SETUP,
        Phase.RUNNING,
        Phase.EXITED,
    ]


def test_a_repeated_assignment_runs_once(harness):
    harness.assign("sh", "-c", "echo once; sleep 0.5")
    harness.start()
    harness.wait_for_exit()
    count = len(harness.control_plane.heartbeats)
    wait_until(lambda: len(harness.control_plane.heartbeats) > count + 3)
    assert harness.log().count("once\n") == 1
    assert harness.control_plane.heartbeats[-1].phase is Phase.EXITED


def test_an_exit_is_reported_until_the_assignment_ends_and_the_last_folder_is_kept(harness):
    for number in range(3):
        harness.assign("sh", "-c", "echo hello", attempt_id=f"j1.{number}", number=number)
        if number == 0:
            harness.start()
        harness.wait_for_exit(f"j1.{number}")
    harness.control_plane.assignment = None
    wait_until(lambda: harness.control_plane.heartbeats[-1].phase is Phase.IDLE)
    assert harness.control_plane.heartbeats[-1].attempt_id is None
    wait_until(lambda: [path.name for path in harness.work.glob("j*")] == ["j1.2"])
    assert "hello" in (harness.work / "j1.2" / "output.log").read_text()


def test_an_attempt_that_ended_is_not_run_again(harness):
    harness.assign("sh", "-c", "echo once")
    harness.start()
    harness.wait_for_exit()
    assignment, harness.control_plane.assignment = harness.control_plane.assignment, None
    wait_until(lambda: harness.control_plane.heartbeats[-1].phase is Phase.IDLE)
    harness.control_plane.assignment = assignment
    wait_until(lambda: harness.control_plane.heartbeats[-1].phase is Phase.EXITED)
    assert harness.log().count("once\n") == 1


def test_stdin_is_closed_and_the_process_leads_its_own_session(harness):
    harness.assign_python(
        "import os, sys; print('read', repr(sys.stdin.read()));"
        "print('leads', os.getsid(0) == os.getpid() == os.getpgid(0))"
    )
    harness.start()
    assert harness.wait_for_exit().clean
    assert "read ''\nleads True\n" in harness.log()


def test_twenty_megabytes_of_output_are_uploaded_in_small_chunks(harness):
    harness.assign_python(
        "import sys\nfor n in range(200): sys.stdout.write(f'{n:06d}' + 'x' * 104_850 + '\\n')\n"
    )
    harness.start()
    assert harness.wait_for_exit(within=60).clean
    lines = harness.log().splitlines()[1:-1]
    assert [line[:6] for line in lines] == [f"{n:06d}" for n in range(200)]
    assert {len(line) for line in lines} == {104_856}
    assert harness.control_plane.largest_chunk <= 256 * 1024


def test_binary_output_and_a_missing_final_newline_are_kept(harness):
    harness.assign_python("import os; os.write(1, bytes(range(256))); os.write(2, b'end')")
    harness.start()
    harness.wait_for_exit()
    log = bytes(harness.control_plane.logs["j1.0"])
    assert bytes(range(256)) + b"end\n[tpufleet] exited with status 0" in log


def test_writing_to_dev_stderr_does_not_truncate_the_log(harness):
    harness.assign("sh", "-c", "echo first; echo second > /dev/stderr; echo third")
    harness.start()
    harness.wait_for_exit()
    assert "first\nsecond\nthird\n" in harness.log()


def test_a_failure_is_reported_with_status_and_last_line(harness):
    harness.assign_python("print('so far'); raise ValueError('bad shape')")
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.status, exit.signal, exit.during_setup) == (1, None, False)
    assert exit.log_line == "ValueError: bad shape"
    assert exit.evidence is None and not exit.oom_killed
    assert "[tpufleet] exited with status 1 after" in harness.log()


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.", EndReason.OUT_OF_HBM),
        ("OSError: [Errno 28] No space left on device: '/x'", EndReason.DISK_FULL),
        ("jax.errors.JaxRuntimeError: UNAVAILABLE: peer gone", EndReason.CONNECTION_LOST),
    ],
    ids=["hbm", "disk", "connection"],
)
def test_log_lines_of_a_failure_are_matched_against_signatures(harness, text, evidence):
    harness.assign_python(f"print({text!r}); print('and then some'); raise SystemExit(1)")
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.evidence, exit.log_line) == (evidence, text)


def test_a_signature_in_the_log_of_a_success_is_ignored(harness):
    harness.assign("echo", "No space left on device")
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.clean and exit.evidence is None


def test_setup_output_is_not_evidence_for_the_command(harness):
    harness.assign("sh", "-c", "exit 4", setup=("echo", "No space left on device"))
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.status, exit.evidence) == (4, None)


def test_an_unexplained_sigkill_is_not_reported_as_out_of_memory(harness):
    harness.assign_python("import os; os.kill(os.getpid(), 9)")
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.status, exit.signal) == (None, signal.SIGKILL)
    assert not exit.oom_killed and not exit.stopped_by_agent


def test_a_failed_setup_skips_the_command(harness):
    harness.assign("echo", "never", setup=("sh", "-c", "echo no wheel; exit 7"))
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.during_setup, exit.status, exit.log_line) == (True, 7, "no wheel")
    assert "never" not in harness.log()


@pytest.mark.parametrize(
    ("setup", "command", "during_setup"),
    [((), ("no-such-program", "x"), False), (("no-such-setup",), ("true",), True)],
    ids=["command", "setup"],
)
def test_a_missing_program_has_status_127(harness, setup, command, during_setup):
    harness.assign(*command, setup=setup)
    harness.start()
    exit = harness.wait_for_exit()
    assert (exit.status, exit.during_setup) == (127, during_setup)
    assert ": No such file or directory" in exit.log_line
    assert exit.log_line in harness.log()


def test_a_file_that_is_not_executable_has_status_126(harness):
    harness.control_plane.snapshots["d1"] = archive(notes="just text")
    harness.assign("./notes", snapshot="d1")
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.status == 126
    assert "Permission denied" in exit.log_line


def test_a_missing_snapshot_fails_setup(harness):
    harness.assign("true", snapshot="gone")
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.during_setup and not exit.clean and not exit.stopped_by_agent
    assert "no such snapshot" in exit.log_line
    assert "no such snapshot" in harness.log()


def test_a_snapshot_with_paths_outside_its_folder_is_rejected(harness):
    harness.control_plane.snapshots["evil"] = archive(**{"..__..__escaped": "x"})
    harness.assign("true", snapshot="evil")
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.during_setup and "cannot unpack the snapshot" in exit.log_line
    assert not list(harness.folder.rglob("escaped"))


def test_a_truncated_snapshot_fails_setup(harness):
    harness.control_plane.snapshots["cut"] = archive(a="x" * 50_000)[:-40]
    harness.assign("true", snapshot="cut")
    harness.start()
    assert harness.wait_for_exit().during_setup


def test_each_attempt_starts_from_a_clean_code_folder(harness):
    harness.control_plane.snapshots["d1"] = archive(a="x")
    harness.assign("sh", "-c", "ls; touch left-behind; echo changed > a", snapshot="d1")
    harness.start()
    harness.wait_for_exit()
    del harness.control_plane.snapshots["d1"]  # what the agent has is enough
    harness.assign("sh", "-c", "ls; cat a", snapshot="d1", attempt_id="j1.1", number=1)
    assert harness.wait_for_exit("j1.1").clean and "changed" not in harness.log("j1.1")
    assert "left-behind" not in harness.log("j1.1").split("command: ")[1].split("\n", 1)[1]


def test_only_its_user_enters_the_folder_of_an_attempt(tmp_path):
    before = os.umask(0)
    try:
        attempt = AttemptFolder(tmp_path, AttemptId("j1.0"))
        assert attempt.create()
    finally:
        os.umask(before)
    assert stat.S_IMODE(attempt.path.stat().st_mode) == 0o700
    inside = (attempt.code, attempt.logs, attempt.output, attempt.token)
    assert all(path.is_relative_to(attempt.path) for path in inside)


def test_secrets_are_only_in_the_environment_of_the_program(harness):
    harness.assign_python(
        "import os, sys; print('HAS', os.environ['API_KEY'] == 'hunter' + '2')\n"
        "print([n for n, v in os.environ.items() if 'slice-' + 'token' in v or v == '/t'])\n"
        "import time; time.sleep(60)",
        secrets={"API_KEY": "hunter2"},
        env={"PLAIN": "yes"},
    )
    harness.start(
        base_env={"TPUFLEET_TOKEN_FILE": "/t", "X": f"Bearer {harness.control_plane.token}"}
    )
    harness.wait_for_log("HAS True\n[]\n")
    assert len(harness.programs()) == 1
    assert not any("hunter2" in " ".join(each.cmdline()) for each in harness.processes())
    harness.control_plane.assignment = None
    harness.wait_for_exit()
    assert "hunter2" not in harness.log() and "slice-token" not in harness.log()
    on_disk = [path.read_bytes() for path in harness.work.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in data or b"slice-token" in data for data in on_disk)


def test_a_file_secret_is_read_on_the_host(harness):
    (harness.folder / "key").write_text("from-the-host\n")
    harness.assign_python(
        "import os; print(os.environ['KEY'] == 'from-the-' + 'host')",
        secrets={"KEY": f"file:{harness.folder / 'key'}"},
    )
    harness.start()
    assert harness.wait_for_exit().clean
    assert "\nTrue\n" in harness.log() and "from-the-host" not in harness.log()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("Bearer slice-token-3f9a", "credential of this host")],
    ids=["missing", "the agent's own token"],
)
def test_an_unreadable_or_forbidden_secret_fails_setup(harness, content, message):
    if content:
        (harness.folder / "key").write_text(content)
    harness.assign("echo", "never", secrets={"KEY": f"file:{harness.folder / 'key'}"})
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.during_setup and message in exit.log_line
    assert "never\n" not in harness.log() and harness.control_plane.token not in harness.log()


def test_heartbeats_carry_the_progress_of_the_program(harness):
    harness.assign_python(
        "from tpufleet import runtime; import time\n"
        "runtime.progress(7, total=10, checkpoint_step=5, loss=0.5)\ntime.sleep(60)",
        grace=timedelta(seconds=1),
    )
    harness.start()
    heartbeat = wait_until(
        lambda: next(
            (
                heartbeat
                for heartbeat in harness.control_plane.heartbeats
                if heartbeat.progress and heartbeat.progress.step
            ),
            None,
        )
    )
    progress = heartbeat.progress
    assert (progress.step, progress.total, progress.checkpoint_step) == (7, 10, 5)
    assert progress.metrics == {"loss": 0.5} and progress.at is not None


def test_checkpoints_of_a_program_without_reports_are_recognized_by_name(harness):
    (harness.checkpoint / "checkpoint_40").mkdir(parents=True)
    harness.assign(
        "sh",
        "-c",
        f"while ! test -e ../run/go; do sleep 0.05; done; cd {harness.checkpoint};"
        "mkdir checkpoint_120 step_900.orbax-checkpoint-tmp-1; sleep 60",
    )
    harness.start()
    old = wait_until(
        lambda: next(
            (
                heartbeat.progress
                for heartbeat in harness.control_plane.heartbeats
                if heartbeat.progress
            ),
            None,
        )
    )
    assert (old.checkpoint_step, old.at) == (40, None)
    (harness.run_dir() / "go").touch()
    new = wait_until(lambda: (p := harness.control_plane.heartbeats[-1].progress) and p.at and p)
    assert new.checkpoint_step == 120


def test_the_values_of_secrets_do_not_reach_the_log(harness):
    harness.assign(
        sys.executable,
        "-c",
        "import os, sys, time\n"
        "key = os.environ['KEY']\n"
        "print('key is', key)\n"
        "sys.stdout.write(key[:5]); sys.stdout.flush(); time.sleep(0.2)\n"
        "print(key[5:], 'in two writes')\n"
        "sys.exit(key)",
        secrets={"KEY": "s3cr3t-value"},
    )
    harness.start()
    exit = harness.wait_for_exit()
    assert "s3cr3t" not in harness.log() and "s3cr3t" not in exit.log_line
    assert "key is ***" in harness.log() and "*** in two writes" in harness.log()


def test_the_values_of_secrets_do_not_reach_progress_and_results(harness):
    harness.assign_python(
        "import json, os\n"
        "key, folder = os.environ['KEY'], os.environ['TPUFLEET_RUN_DIR']\n"
        "point = {'at': '2026-01-01T00:00:00Z', 'metrics': {'recent ' + key: 2.0}}\n"
        "report = {'message': 'msg ' + key, 'metrics': {key: 1.0}, 'recent': [point]}\n"
        "open(folder + '/result', 'w').write(json.dumps({'key': key}))\n"
        "open(folder + '/.new', 'w').write(json.dumps(report))\n"
        "os.rename(folder + '/.new', folder + '/progress.json')",
        secrets={"KEY": "s3cr3t-value"},
    )
    harness.start()
    harness.wait_for_exit()
    heartbeats = [each for each in harness.control_plane.heartbeats if each.progress]
    progress = heartbeats[-1].progress
    assert (progress.message, progress.metrics) == ("msg ***", {"***": 1.0})
    assert {"recent ***": 2.0} in [point.metrics for each in heartbeats for point in each.points]
    assert "s3cr3t" not in repr(harness.control_plane.heartbeats)
    assert harness.control_plane.results == {"j1.0": b'{"key": "***"}'}


def test_a_short_program_reports_a_point_for_every_step(harness):
    harness.assign_python(
        "from tpufleet.runtime import progress\n"
        "for step in range(1, 21): progress(step, total=20, loss=1 / step)\n"
    )
    harness.start()
    assert harness.wait_for_exit().clean
    points = [each for beat in harness.control_plane.heartbeats for each in beat.points]
    assert [point.step for point in points] == list(range(1, 21))
    assert points[3].metrics == {"loss": 0.25}
    assert [point.at for point in points] == sorted({point.at for point in points}), "each once"


def test_a_fast_program_is_thinned_and_keeps_its_last_point(harness):
    harness.assign_python(
        "from tpufleet.runtime import progress\n"
        "for step in range(1, 5001): progress(step, loss=1 / step)\n"
    )
    harness.start()
    assert harness.wait_for_exit().clean
    beats = harness.control_plane.heartbeats
    assert max(len(beat.points) for beat in beats) <= MAX_HEARTBEAT_POINTS
    points = [each for beat in beats for each in beat.points]
    assert points[-1].step == 5000 and len(points) >= 20
