"""The runtime outside tpufleet, and the files it writes inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpufleet import runtime
from tpufleet.errors import BadInput


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run in a new process: signal handlers and exit hooks are per process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TPUFLEET_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=900,
    )


def read_progress(run_dir: Path) -> dict:
    return json.loads((run_dir / "progress.json").read_text())


def test_the_default_context_is_a_single_process():
    here = runtime.context({})
    assert (here.process_id, here.num_processes) == (0, 1)
    assert here.checkpoint_dir == str(Path("checkpoints").absolute())
    assert here.alone and here.coordinator_address is None


def test_the_context_is_read_from_the_environment():
    here = runtime.context(
        {
            "TPUFLEET_PROCESS_ID": "3",
            "TPUFLEET_NUM_PROCESSES": "4",
            "TPUFLEET_COORDINATOR_ADDRESS": "h:1",
            "TPUFLEET_JOB_ID": "j",
            "TPUFLEET_ATTEMPT": "2",
            "TPUFLEET_CHECKPOINT_DIR": "/c",
            "TPUFLEET_RUN_DIR": "/r",
            "MEGASCALE_SLICE_ID": "1",
            "MEGASCALE_NUM_SLICES": "2",
        }
    )
    assert (here.process_id, here.num_processes, here.attempt) == (3, 4, 2)
    assert (here.slice_index, here.num_slices) == (1, 2)
    assert (here.checkpoint_dir, here.run_dir, here.alone) == ("/c", Path("/r"), False)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TPUFLEET_ATTEMPT": "two"}, "TPUFLEET_ATTEMPT must be a whole number"),
        ({"TPUFLEET_PROCESS_ID": "1"}, "ids start at 0"),
    ],
    ids=["not a number", "id out of range"],
)
def test_an_invalid_context_is_rejected(environ, message):
    with pytest.raises(BadInput, match=message):
        runtime.context(environ)


def test_importing_the_runtime_loads_only_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); from tpufleet import runtime\n"
        "new = {name.split('.')[0] for name in sys.modules.keys() - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert run(code).stdout == "['tpufleet']\n"


def test_sigterm_sets_the_flag_and_calls_the_previous_handler():
    code = (
        "import os, signal; from tpufleet import runtime\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('mine too'))\n"
        "runtime.initialize(); runtime.install_stop_handler()\n"
        "print(runtime.should_stop()); os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(runtime.should_stop(), runtime.should_stop_together())"
    )
    assert run(code).stdout == "False\nmine too\nTrue True\n"


def test_no_handler_is_installed_outside_the_main_thread():
    code = (
        "import threading; from tpufleet import runtime\n"
        "t = threading.Thread(target=lambda: print(runtime.install_stop_handler()))\n"
        "t.start(); t.join()"
    )
    assert run(code).stdout == "False\n"


def test_the_stop_file_requests_a_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUFLEET_RUN_DIR", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    assert not runtime.should_stop()
    (tmp_path / "stop").touch()
    assert runtime.should_stop()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_last_report_is_written_at_exit(tmp_path):
    code = (
        "from tpufleet import runtime\n"
        "for step in range(1000): runtime.progress(step, total=1000, loss=1 / (step + 1))"
    )
    run(code, TPUFLEET_RUN_DIR=str(tmp_path))
    report = read_progress(tmp_path)
    assert (report["step"], report["total"], report["metrics"]) == (999, 1000, {"loss": 0.001})


def test_the_last_report_is_written_even_if_the_program_hangs(tmp_path):
    code = (
        "import os, time; from tpufleet import runtime\n"
        "for step in range(10): runtime.progress(step)\n"
        "time.sleep(0.6); os._exit(0)"
    )
    run(code, TPUFLEET_RUN_DIR=str(tmp_path))
    assert read_progress(tmp_path)["step"] == 9


def test_reports_are_throttled_but_checkpoints_are_always_written(tmp_path):
    code = (
        "import json, os, time; from pathlib import Path; from tpufleet import runtime\n"
        "file = Path(os.environ['TPUFLEET_RUN_DIR'], 'progress.json'); seen = set()\n"
        "runtime.progress(0)\n"
        "for step in range(1, 200):\n"
        "    runtime.progress(step); seen.add(file.stat().st_ino)\n"
        "runtime.progress(200, checkpoint_step=200)\n"
        "print(len(seen) < 20, json.loads(file.read_text())['checkpoint_step'], flush=True)\n"
        "runtime.progress(201); os._exit(0)"
    )
    assert run(code, TPUFLEET_RUN_DIR=str(tmp_path)).stdout == "True 200\n"


def test_metrics_that_are_not_finite_numbers_are_omitted(tmp_path):
    code = (
        "from tpufleet import runtime\n"
        "runtime.progress(1, loss=float('nan'), rate=2, checkpoint_step=1)\n"
        "runtime.progress(2, rate=3)"
    )
    run(code, TPUFLEET_RUN_DIR=str(tmp_path))
    report = read_progress(tmp_path)
    assert (report["step"], report["checkpoint_step"], report["metrics"]) == (2, 1, {"rate": 3.0})


@pytest.mark.parametrize("value", ["'x'", "None", "{'loss': 1.0}", "[1.0]"])
def test_metrics_that_are_not_numbers_are_rejected(value):
    done = run(f"from tpufleet import runtime; runtime.progress(1, metrics={value})")
    assert done.returncode == 1
    assert "TypeError: progress: metrics " in done.stderr
    assert "progress(step, loss=loss)" in done.stderr


def test_progress_does_nothing_outside_tpufleet(tmp_path):
    done = run(f"import os; os.chdir({str(tmp_path)!r})\n"
               "from tpufleet import runtime; runtime.progress(1)")  # fmt: skip
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
