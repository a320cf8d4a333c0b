"""`tpu demo`: a JAX job is preempted, resumes on another slice, and gives the same result."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError, install_command
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs import follow, follow_display
from tpufleet.views.cli.operators import serve

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

TYPE = "v5e-16"
STEPS = 60
PREEMPT_AT = 0.5  # fraction of the steps
CHECKPOINT_EVERY = 10
# Long enough that the slice can visibly be preempted in the middle of the run.
STEP_SECONDS = 0.1
WORKLOAD = Path(__file__).parents[3] / "demo"


@click.command(
    epilog="\b\nExamples:\n  tpu demo\n  tpu demo --multislice\n  tpu demo --notice --dir demo-1\n",
)
@click.option("--multislice", is_flag=True, help="Train over two slices.")
@click.option("--notice", is_flag=True, help="Send a preemption notice first, as clouds do.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Keep database, logs and checkpoints in this new folder.",
)
@output.json_option
@click.pass_context
def demo(
    context: click.Context,
    multislice: bool,
    notice: bool,
    folder: Path | None,
) -> None:
    """Train a small JAX model on a simulated v5e-16 (4 hosts, 16 chips), twice.

    The first run is undisturbed. In the second, the slice is preempted halfway; the job gets a new
    one and resumes from its last checkpoint. Then the two results are compared bit for bit. Needs
    no cloud and no server, and leaves nothing behind.
    """
    _require_jax()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: leave nothing behind
    with _working_folder(folder) as home, _control_plane(home) as client:
        run = _DemoRun(client, slices=2 if multislice else 1, notice=notice)
        context.exit(0 if run.run() else 1)


class _DemoRun:
    def __init__(self, client: FleetClient, *, slices: int, notice: bool) -> None:
        self._client = client
        self._slices = slices
        self._fault = "preempt-notice" if notice else "preempt"
        self._start = time.monotonic()

    def run(self) -> bool:
        chips = f"{self._slices} × {TYPE}: {4 * self._slices} hosts, {16 * self._slices} chips"
        self._heading(f"1. A training job without disturbance ({chips}, simulated)")
        baseline = self._train("baseline", follow_display.screen())
        self._heading("2. The same job, preempted halfway")
        screen = follow_display.screen()
        preempted = self._train("preempted", _PreemptingScreen(self._client, screen, self._fault))
        self._heading("3. The two results")
        return self._compare(baseline, preempted)

    def _train(self, name: str, screen: follow_display.Screen) -> dict[str, Any]:
        job = self._submit(name)
        rows = follow.follow(self._client, [job], screen, logs=False)
        detail = self._client.job(job)
        if rows[job].state is not JobState.SUCCEEDED:
            raise FleetError(f"job {name} {rows[job].state}: {rows[job].reason}")
        result = json.loads((Path(detail.job.checkpoint) / "result.json").read_text())
        return {**result, "attempts": len(detail.attempts)}

    def _submit(self, name: str) -> JobId:
        from tpufleet.client import snapshots
        from tpufleet.client.fleet import new_job_id

        arguments = {
            "steps": STEPS,
            "checkpoint_every": CHECKPOINT_EVERY,
            "step_seconds": STEP_SECONDS,
        }
        command = [sys.executable, "train.py", *(f"{key}={arguments[key]}" for key in arguments)]
        spec = {
            "name": f"demo-{name}",
            "command": command,
            "accelerator": TYPE,
            "slices": self._slices,
            "grace": "20s",
        }
        scanned = snapshots.scan(WORKLOAD)
        snapshots.upload(self._client, scanned)
        job = NewJob(id=new_job_id(), spec=spec, snapshot=scanned.digest)
        return self._client.submit([job])[0].id

    def _compare(self, baseline: dict[str, Any], preempted: dict[str, Any]) -> bool:
        same = all(baseline[key] == preempted[key] for key in ("steps", "loss", "params_sha256"))
        seconds = time.monotonic() - self._start
        if output.as_json():
            outcome = {
                "same": same,
                "baseline": baseline,
                "preempted": preempted,
                "seconds": round(seconds, 1),
            }
            click.echo(json.dumps({"kind": "result", "result": outcome}))
            return same
        for name, result in (("baseline ", baseline), ("preempted", preempted)):
            click.echo(
                f"   {name}: {result['steps']} steps in "
                f"{text.counted(result['attempts'], 'attempt')}, "
                f"loss {float.fromhex(result['loss']):.9f}, "
                f"parameters {result['params_sha256'][:16]}…"
            )
        verdict = "identical, bit for bit" if same else "DIFFERENT"
        colour = "green" if same else "red"
        click.secho(
            f"   Loss and parameters are {verdict}. ({seconds:.0f} s)", fg=colour, bold=True
        )
        return same

    def _heading(self, title: str) -> None:
        if not output.as_json():
            click.secho(f"\n{title}", bold=True)


class _PreemptingScreen:
    """A screen that also preempts the slice of the job halfway."""

    def __init__(self, client: FleetClient, screen: follow_display.Screen, fault: str) -> None:
        self._client = client
        self._fault = fault
        self._done = False
        self.event, self.log = screen.event, screen.log
        self.note, self.close = screen.note, screen.close
        self.waiting, self.shows_waiting = screen.waiting, screen.shows_waiting
        self._show = screen.row

    def row(self, row: JobRow) -> None:
        self._show(row)
        step = row.progress.step if row.progress else None
        if not self._done and step is not None and step >= STEPS * PREEMPT_AT:
            self._done = True
            slice_id = self._client.job(row.id).slices[-1].id
            self.note(f"          >>> preempting slice {slice_id} at step {step}")
            self._client.inject_fault(slice_id, self._fault)


def _require_jax() -> None:
    if importlib.util.find_spec("jax") is None:
        raise BadInput(f"the demo needs JAX\n  next: {install_command('tpufleet[demo]')}")


@contextmanager
def _working_folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is None:
        with tempfile.TemporaryDirectory(
            prefix="tpufleet-demo-", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
        return
    chosen = chosen.absolute()
    if chosen.exists() and any(chosen.iterdir()):
        raise BadInput(f"--dir: {chosen} is not empty; pass a new folder")
    chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    yield chosen


@contextmanager
def _control_plane(home: Path) -> Iterator[FleetClient]:
    """A separate server without the user's settings; stopped afterwards, with its slices."""
    from tpufleet.compose.providers import delete_local_slices

    for name in [name for name in os.environ if name.startswith("TPUFLEET_")]:
        del os.environ[name]
    os.environ["TPUFLEET_HOME"] = str(home)
    os.environ["TPUFLEET_CONFIG"] = os.devnull
    try:
        # It is stopped with the demo.
        with connection.connect(start=True, announce=False) as client:
            yield client
    finally:
        serve.stop_server(home)
        delete_local_slices(home)
