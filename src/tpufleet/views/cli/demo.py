"""`tpu demo`: a JAX job loses its TPU half way, finishes on another, and the result is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model.api_types import JobRow, NewJob
from tpufleet.model.jobs import JobId, JobState
from tpufleet.views.cli import connection, follow, follow_display, serve, submit

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

TYPE = "v5litepod-16"
STEPS = 60
TAKE_AWAY_AT = 0.5  # of the way
CHECKPOINT_EVERY = 10
# Long enough a step that the hardware can be taken away in the middle, and be seen to be.
STEP_SECONDS = 0.1
WORKLOAD = Path(__file__).parents[2] / "demo"


def demo_command(clear: Callable[[Path], None]) -> click.Command:
    """`clear` takes away whatever simulated slices are left below a state folder."""

    @click.command(
        "demo",
        short_help="Watch a job lose its TPU and finish.",
        epilog="\b\nExamples:\n  tpu demo\n  tpu demo --multislice\n  tpu demo --notice --keep\n",
    )
    @click.option("--multislice", is_flag=True, help="Train over two slices at once.")
    @click.option("--notice", is_flag=True, help="Give the preemption notice that clouds give.")
    @click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        help="Where (default: a temporary folder).",
    )
    @click.option("--keep", is_flag=True, help="Keep the folder: database, logs, checkpoints.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON lines, for programs.")
    @click.pass_context
    def demo(
        context: click.Context,
        multislice: bool,
        notice: bool,
        folder: Path | None,
        keep: bool,
        as_json: bool,
    ) -> None:
        """Train a small JAX model on a simulated v5litepod-16 (4 hosts, 16 chips), twice.

        The first run is left alone. In the second the slice is taken away half way; the job gets
        a new one and goes on from its last checkpoint. Then the two results are compared, bit for
        bit. Needs no cloud and no server, and leaves nothing behind.
        """
        _need_jax()
        with _folder(folder, keep) as home, _control_plane(home, clear) as client:
            show = _Show(client, slices=2 if multislice else 1, notice=notice, as_json=as_json)
            context.exit(0 if show.run() else 1)

    return demo


class _Show:
    def __init__(self, client: FleetClient, *, slices: int, notice: bool, as_json: bool) -> None:
        self._client = client
        self._slices = slices
        self._fault = "preempt-notice" if notice else "preempt"
        self._as_json = as_json
        self._began = time.monotonic()

    def run(self) -> bool:
        chips = f"{self._slices} × {TYPE}: {4 * self._slices} hosts, {16 * self._slices} chips"
        self._say(f"1. A training job that is left alone ({chips}, simulated)")
        calm = self._train("calm", follow_display.screen_for(self._as_json))
        self._say("2. The same job, whose slice is taken away half way")
        hurt = self._train(
            "hurt", _TakesAway(self._client, follow_display.screen_for(self._as_json), self._fault)
        )
        self._say("3. The two results")
        return self._compare(calm, hurt)

    def _train(self, name: str, screen: follow_display.Screen) -> dict[str, Any]:
        job = self._submit(name)
        rows = follow.follow(self._client, [job], screen, logs=False)
        detail = self._client.job(job)
        if rows[job].state is not JobState.SUCCEEDED:
            raise FleetError(f"the job {name} {rows[job].state}: {rows[job].reason}")
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
        submit.upload(self._client, scanned)
        job = NewJob(id=new_job_id(), spec=spec, snapshot=scanned.digest)
        return self._client.submit([job])[0].id

    def _compare(self, calm: dict[str, Any], hurt: dict[str, Any]) -> bool:
        same = all(calm[key] == hurt[key] for key in ("steps", "loss", "params_sha256"))
        took = time.monotonic() - self._began
        if self._as_json:
            outcome = {"same": same, "calm": calm, "hurt": hurt, "seconds": round(took, 1)}
            click.echo(json.dumps({"kind": "result", "result": outcome}))
            return same
        for name, result in (("left alone", calm), ("taken away", hurt)):
            attempts = f"{result['attempts']} attempt{'s' if result['attempts'] > 1 else ''}"
            click.echo(
                f"   {name}: {result['steps']} steps in {attempts}, "
                f"loss {float.fromhex(result['loss']):.9f}, "
                f"parameters {result['params_sha256'][:16]}…"
            )
        verdict = "the same, bit for bit" if same else "NOT THE SAME"
        colour = "green" if same else "red"
        click.secho(f"   Loss and parameters are {verdict}. ({took:.0f} s)", fg=colour, bold=True)
        return same

    def _say(self, words: str) -> None:
        if not self._as_json:
            click.secho(f"\n{words}", bold=True)


class _TakesAway:
    """A screen that, besides showing the job, takes its slice away when it is half way."""

    def __init__(self, client: FleetClient, screen: follow_display.Screen, fault: str) -> None:
        self._client = client
        self._fault = fault
        self._done = False
        self.event, self.log = screen.event, screen.log
        self.note, self.close = screen.note, screen.close
        self._show = screen.row

    def row(self, row: JobRow) -> None:
        self._show(row)
        step = row.progress.step if row.progress else None
        if not self._done and step is not None and step >= STEPS * TAKE_AWAY_AT:
            self._done = True
            victim = self._client.job(row.id).slices[-1].id
            self.note(f"          >>> taking slice {victim} away at step {step}")
            self._client.inject_fault(victim, self._fault)


def _need_jax() -> None:
    if importlib.util.find_spec("jax") is None:
        raise BadInput("the demo trains with JAX, which is not here; pip install 'tpufleet[demo]'")


@contextmanager
def _folder(chosen: Path | None, keep: bool) -> Iterator[Path]:
    if chosen is not None:
        chosen = chosen.absolute()
        if chosen.exists() and any(chosen.iterdir()):
            raise BadInput(f"--dir: {chosen} is not empty; name a new folder")
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = chosen or Path(tempfile.mkdtemp(prefix="tpufleet-demo-"))
    try:
        yield folder
    finally:
        if keep:
            click.echo(f"kept in {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _control_plane(home: Path, clear: Callable[[Path], None]) -> Iterator[FleetClient]:
    """A server of our own, deaf to the user's settings; gone afterwards, with all it started."""
    for name in [name for name in os.environ if name.startswith("TPUFLEET_")]:
        del os.environ[name]
    os.environ["TPUFLEET_HOME"] = str(home)
    os.environ["TPUFLEET_CONFIG"] = str(home / "no-config.yaml")
    client = connection.connect(start=True, announce=False)  # it ends with the demo
    try:
        yield client
    finally:
        client.close()
        serve.stop_server(home)
        clear(home)
