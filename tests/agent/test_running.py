"""Running what is assigned: code, setup, command, output, environment."""

from __future__ import annotations

import io
import signal
import sys
import tarfile
from datetime import timedelta

import pytest

from tests.agent.control_plane import wait_until
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import Phase


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_setup_and_command_run_in_the_unpacked_code_and_their_output_arrives_in_order(world):
    world.plane.snapshots["d1"] = archive(train_py="print('training', open('made').read())")
    world.assign(
        sys.executable,
        "train.py",
        setup=("sh", "-c", "echo preparing; echo x > made"),
        snapshot="d1",
    )
    world.start()
    exit = world.exit()
    assert exit.clean and not exit.stopped_by_us and exit.evidence is None and exit.line == ""
    lines = world.log().splitlines()
    assert lines[0] == "[tpufleet] setup: sh -c 'echo preparing; echo x > made'"
    assert lines[1] == "preparing"
    assert lines[2].startswith("[tpufleet] exited with status 0 after ")
    assert lines[3].startswith("[tpufleet] command: ")
    assert lines[4] == "training x"
    assert lines[-1].startswith("[tpufleet] exited with status 0 after ")


def test_the_phases_are_reported_in_order(world):
    world.assign("sh", "-c", "sleep 0.4", setup=("sh", "-c", "sleep 0.4"))
    world.start()
    world.exit()
    phases = [beat.phase for beat in world.plane.beats]
    assert sorted(set(phases), key=phases.index) == [
        Phase.IDLE,
        Phase.SETUP,
        Phase.RUNNING,
        Phase.EXITED,
    ]


def test_the_same_assignment_again_and_again_runs_once(world):
    world.assign("sh", "-c", "echo once; sleep 0.5")
    world.start()
    world.exit()
    count = len(world.plane.beats)
    wait_until(lambda: len(world.plane.beats) > count + 3)
    assert world.log().count("once\n") == 1
    assert world.plane.beats[-1].phase is Phase.EXITED


def test_an_exit_is_told_until_the_assignment_vanishes_and_the_last_folder_is_kept(world):
    for number in range(3):
        world.assign("sh", "-c", "echo hello", attempt_id=f"j1.{number}", number=number)
        if number == 0:
            world.start()
        world.exit(f"j1.{number}")
    world.plane.assignment = None
    wait_until(lambda: world.plane.beats[-1].phase is Phase.IDLE)
    assert world.plane.beats[-1].attempt_id is None
    wait_until(lambda: [path.name for path in world.work.iterdir()] == ["j1.2"])
    assert "hello" in (world.work / "j1.2" / "output.log").read_text()


def test_an_attempt_that_ended_here_is_not_run_again_when_it_comes_back(world):
    world.assign("sh", "-c", "echo once")
    world.start()
    world.exit()
    assignment, world.plane.assignment = world.plane.assignment, None
    wait_until(lambda: world.plane.beats[-1].phase is Phase.IDLE)
    world.plane.assignment = assignment
    wait_until(lambda: world.plane.beats[-1].phase is Phase.EXITED)
    assert world.log().count("once\n") == 1


def test_stdin_is_closed_and_the_process_leads_its_own_session(world):
    world.assign_python(
        "import os, sys; print('read', repr(sys.stdin.read()));"
        "print('leads', os.getsid(0) == os.getpid() == os.getpgid(0))"
    )
    world.start()
    assert world.exit().clean
    assert "read ''\nleads True\n" in world.log()


def test_twenty_megabytes_arrive_whole_in_small_chunks(world):
    world.assign_python(
        "import sys\nfor n in range(200): sys.stdout.write(f'{n:06d}' + 'x' * 104_850 + '\\n')\n"
    )
    world.start()
    assert world.exit(within=60).clean
    lines = world.log().splitlines()[1:-1]
    assert [line[:6] for line in lines] == [f"{n:06d}" for n in range(200)]
    assert {len(line) for line in lines} == {104_856}
    assert world.plane.largest_chunk <= 256 * 1024


def test_bytes_that_are_no_text_and_a_missing_last_newline_are_kept(world):
    world.assign_python("import os; os.write(1, bytes(range(256))); os.write(2, b'end')")
    world.start()
    world.exit()
    whole = bytes(world.plane.logs["j1.0"])
    assert bytes(range(256)) + b"end\n[tpufleet] exited with status 0" in whole


def test_writing_to_dev_stderr_does_not_lose_what_was_written_before(world):
    world.assign("sh", "-c", "echo first; echo second > /dev/stderr; echo third")
    world.start()
    world.exit()
    assert "first\nsecond\nthird\n" in world.log()


def test_a_failure_tells_its_status_and_last_line(world):
    world.assign_python("print('so far'); raise ValueError('bad shape')")
    world.start()
    exit = world.exit()
    assert (exit.status, exit.signal, exit.during_setup) == (1, None, False)
    assert exit.line == "ValueError: bad shape"
    assert exit.evidence is None and not exit.oom_killed
    assert "[tpufleet] exited with status 1 after" in world.log()


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.", EndReason.OUT_OF_HBM),
        ("OSError: [Errno 28] No space left on device: '/x'", EndReason.DISK_FULL),
        ("jax.errors.JaxRuntimeError: UNAVAILABLE: peer gone", EndReason.CONNECTION_LOST),
    ],
    ids=["hbm", "disk", "connection"],
)
def test_the_last_lines_of_a_failure_are_evidence(world, text, evidence):
    world.assign_python(f"print({text!r}); print('and then some'); raise SystemExit(1)")
    world.start()
    exit = world.exit()
    assert (exit.evidence, exit.line) == (evidence, text)


def test_a_success_that_quotes_a_signature_is_no_evidence(world):
    world.assign("echo", "No space left on device")
    world.start()
    exit = world.exit()
    assert exit.clean and exit.evidence is None


def test_what_setup_said_is_no_evidence_for_the_command(world):
    world.assign("sh", "-c", "exit 4", setup=("echo", "No space left on device"))
    world.start()
    exit = world.exit()
    assert (exit.status, exit.evidence) == (4, None)


def test_a_kill_that_nobody_explains_is_not_called_out_of_memory(world):
    world.assign_python("import os; os.kill(os.getpid(), 9)")
    world.start()
    exit = world.exit()
    assert (exit.status, exit.signal) == (None, signal.SIGKILL)
    assert not exit.oom_killed and not exit.stopped_by_us


def test_a_failed_setup_ends_the_attempt_before_its_command(world):
    world.assign("echo", "never", setup=("sh", "-c", "echo no wheel; exit 7"))
    world.start()
    exit = world.exit()
    assert (exit.during_setup, exit.status, exit.line) == (True, 7, "no wheel")
    assert "never" not in world.log()


@pytest.mark.parametrize(
    ("setup", "command", "during_setup"),
    [((), ("no-such-program", "x"), False), (("no-such-setup",), ("true",), True)],
    ids=["command", "setup"],
)
def test_a_program_that_is_not_there_says_so(world, setup, command, during_setup):
    world.assign(*command, setup=setup)
    world.start()
    exit = world.exit()
    assert (exit.status, exit.during_setup) == (127, during_setup)
    assert "cannot be started: No such file or directory" in exit.line
    assert exit.line in world.log()


def test_a_file_that_is_no_program_says_so(world):
    world.plane.snapshots["d1"] = archive(notes="just text")
    world.assign("./notes", snapshot="d1")
    world.start()
    exit = world.exit()
    assert exit.status == 126
    assert "Permission denied" in exit.line


def test_a_missing_snapshot_is_a_failed_setup(world):
    world.assign("true", snapshot="gone")
    world.start()
    exit = world.exit()
    assert exit.during_setup and not exit.clean and not exit.stopped_by_us
    assert "no such snapshot" in exit.line
    assert "no such snapshot" in world.log()


def test_a_snapshot_that_reaches_outside_its_folder_is_refused(world):
    world.plane.snapshots["evil"] = archive(**{"..__..__escaped": "x"})
    world.assign("true", snapshot="evil")
    world.start()
    exit = world.exit()
    assert exit.during_setup and "does not unpack" in exit.line
    assert not list(world.folder.rglob("escaped"))


def test_a_snapshot_that_is_cut_off_is_a_failed_setup(world):
    world.plane.snapshots["cut"] = archive(a="x" * 50_000)[:-40]
    world.assign("true", snapshot="cut")
    world.start()
    assert world.exit().during_setup


def test_each_attempt_begins_in_fresh_code(world):
    world.plane.snapshots["d1"] = archive(a="x")
    world.assign("sh", "-c", "ls; touch left-behind", snapshot="d1")
    world.start()
    world.exit()
    world.assign("sh", "-c", "ls", snapshot="d1", attempt_id="j1.1", number=1)
    world.exit("j1.1")
    assert "left-behind" not in world.log("j1.1").split("command: ")[1].split("\n", 1)[1]


def test_secrets_reach_the_program_and_nothing_else(world):
    world.assign_python(
        "import os, sys; print('HAS', os.environ['API_KEY'] == 'hunter' + '2')\n"
        "print([n for n, v in os.environ.items() if 'slice-' + 'token' in v or 'TOKEN' in n])\n"
        "import time; time.sleep(60)",
        secrets={"API_KEY": "hunter2"},
        env={"PLAIN": "yes"},
    )
    world.start(base={"TPUFLEET_TOKEN_FILE": "/t", "X": f"Bearer {world.plane.token}"})
    world.shows("HAS True\n[]\n")
    (process,) = world.processes()
    assert "hunter2" not in " ".join(process.cmdline())
    world.plane.assignment = None
    world.exit()
    assert "hunter2" not in world.log() and "slice-token" not in world.log()
    on_disk = [path.read_bytes() for path in world.work.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in data or b"slice-token" in data for data in on_disk)


def test_a_secret_on_the_host_is_read_there(world):
    (world.folder / "key").write_text("from-the-host\n")
    world.assign_python(
        "import os; print(os.environ['KEY'] == 'from-the-' + 'host')",
        secrets={"KEY": f"file:{world.folder / 'key'}"},
    )
    world.start()
    assert world.exit().clean
    assert "\nTrue\n" in world.log() and "from-the-host" not in world.log()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("Bearer slice-token-3f9a", "credential of this host")],
    ids=["missing", "the agent's own token"],
)
def test_a_secret_that_may_not_or_cannot_be_read_fails_setup(world, content, words):
    if content:
        (world.folder / "key").write_text(content)
    world.assign("echo", "never", secrets={"KEY": f"file:{world.folder / 'key'}"})
    world.start()
    exit = world.exit()
    assert exit.during_setup and words in exit.line
    assert "never\n" not in world.log() and world.plane.token not in world.log()


def test_progress_of_the_program_travels_with_the_beats(world):
    world.assign_python(
        "from tpufleet import runtime; import time\n"
        "runtime.progress(7, total=10, checkpoint_step=5, loss=0.5)\ntime.sleep(60)",
        grace=timedelta(seconds=1),
    )
    world.start()
    beat = wait_until(lambda: next((b for b in world.plane.beats if b.progress), None))
    progress = beat.progress
    assert (progress.step, progress.total, progress.checkpoint_step) == (7, 10, 5)
    assert progress.metrics == {"loss": 0.5} and progress.at is not None


def test_checkpoints_of_a_program_that_reports_nothing_are_found_by_name(world):
    (world.checkpoint / "checkpoint_40").mkdir(parents=True)
    world.assign(
        "sh",
        "-c",
        f"cd {world.checkpoint}; sleep 1; mkdir checkpoint_120 step_900.orbax-checkpoint-tmp-1;"
        "sleep 60",
    )
    world.start()
    old = wait_until(lambda: next((b.progress for b in world.plane.beats if b.progress), None))
    assert (old.checkpoint_step, old.at) == (40, None)
    new = wait_until(lambda: (p := world.plane.beats[-1].progress) and p.at and p)
    assert new.checkpoint_step == 120
