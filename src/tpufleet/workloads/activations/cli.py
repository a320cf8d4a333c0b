"""`tpu extract`: run, status, show and verify here, the other verbs beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from tpufleet.errors import FleetError
from tpufleet.workloads.activations import cli_plan, exchanging
from tpufleet.workloads.activations.cli_plan import COUNT, POSITIVE
from tpufleet.workloads.activations.exchanging import example_epilog

INTERRUPTED = 130  # what shells say of a program ended by Ctrl-C
# What the options of the former scripts are called now.
FORMER_OPTIONS = {
    "model-path": "model",
    "dataset-path": "data",
    "dataset-stream": "data",
    "max-seq-length": "max-length",
    "shard-size-gb": "shard-gb",
    "random-seed": "seed",
    "layers-to-extract": "layers",
    "num-streams": "streams",
    "column-name": "column",
    "no-compress-shards": "no-compress",
}


class _Words(click.Group):
    """Errors that tpufleet raises on purpose are shown as words, not as tracebacks."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except FleetError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"{error.name} is not installed; run `pip install 'tpufleet[extract]'`"
            ) from error


def _spelled(word: str) -> str:
    """The former scripts wrote their options with underscores, and some by other names."""
    word = word.replace("_", "-")
    return FORMER_OPTIONS.get(word, word)


@click.group(cls=_Words, context_settings={"token_normalize_func": _spelled})
def extract() -> None:
    """Extract activations from a language model, each sample exactly once."""


@extract.command(epilog=example_epilog("tpu extract run acts"))
@click.argument("out")
@click.option("--model", help="Where the model lies on this machine, if not where it was planned.")
@click.option("--data", help="Where the data lies on this machine, likewise.")
@click.option("--mesh", default="", help="Such as data=2,fsdp=1,tensor=4. All devices: data.")
@click.option(
    "--scope",
    type=click.Choice(["local", "global"]),
    default="local",
    show_default=True,
    help="A mesh of this process's devices, or one over all hosts.",
)
@click.option(
    "--compute",
    type=click.Choice(["bf16", "f32"]),
    default="bf16",
    show_default=True,
    help="What the model computes in.",
)
@click.option(
    "--memory",
    type=click.Choice(["auto", "pinned", "plain"]),
    default="auto",
    show_default=True,
    help="How activations come to the host: pinned (page-locked), plain, or auto.",
)
@click.option(
    "--lease",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds until a silent worker is given up.",
)
@click.option("--steal-after", type=POSITIVE, help="Seconds before a slow worker's unit is taken.")
@click.option(
    "--preparers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Processes that tokenise; 0: a thread does.",
)
@click.option(
    "--writers", type=COUNT, default=8, show_default=True, help="Threads that hash and write."
)
@click.option("--worker", default="", help="This worker's name, unique among the living.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.pass_context
def run(context: click.Context, out: str, **options: Any) -> None:
    """Work on the plan in OUT until it is done. Any number of workers may run this at once."""
    from tpufleet import runtime
    from tpufleet.workloads.activations import plans, screens
    from tpufleet.workloads.activations.io.storage import open_storage
    from tpufleet.workloads.activations.model import meshes
    from tpufleet.workloads.activations.pipeline import extraction, workers

    runtime.initialize()
    steal = options["steal_after"]
    settings = extraction.ExtractionSettings(
        compute=options["compute"],
        mesh=meshes.parse_mesh(options["mesh"]),
        scope=options["scope"],
        memory=options["memory"],
        lease=timedelta(seconds=options["lease"]),
        steal_after=None if steal is None else timedelta(seconds=steal),
        name=options["worker"],
        options=workers.WorkerOptions(preparers=options["preparers"], writers=options["writers"]),
    )
    storage = open_storage(out)
    screen = None
    if not options["quiet"]:
        screens.show_start(plans.load(storage))
        screen = screens.ProgressLine()
    try:
        meter = extraction.run(
            storage,
            settings,
            model=options["model"],
            data=options["data"],
            on_progress=screen,
        )
    except KeyboardInterrupt:
        click.echo(
            f"\nyou stopped it; what is committed stays, and `tpu extract run {out}` goes on",
            err=True,
        )
        context.exit(INTERRUPTED)
    screens.show_end(meter)


@extract.command(epilog=example_epilog("tpu extract status acts --watch 5"))
@click.argument("outs", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--watch", type=POSITIVE, help="Show it again after so many seconds, until all is done."
)
def status(outs: tuple[str, ...], as_json: bool, watch: float | None) -> None:
    """How far datasets are, and who works on them."""
    from tpufleet.workloads.activations import screens
    from tpufleet.workloads.activations.io.storage import open_storage

    screens.watch_status({out: open_storage(out) for out in outs}, as_json=as_json, every=watch)


@extract.command(epilog=example_epilog("tpu extract show acts 17"))
@click.argument("out")
@click.argument("sample", type=click.IntRange(0))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(out: str, sample: int, as_json: bool) -> None:
    """One stored sample: where it is from, and its activations in short."""
    from tpufleet.workloads.activations import screens
    from tpufleet.workloads.activations.io import datasets

    screens.show_sample(datasets.open_dataset(out), sample, as_json=as_json)


@extract.command(epilog=example_epilog("tpu extract verify acts"))
@click.argument("out")
@click.option("--quick", is_flag=True, help="Records and sizes only; do not read the bytes.")
@click.option("--sweep", is_flag=True, help="Delete what dead workers left, if all is committed.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def verify(context: click.Context, out: str, quick: bool, sweep: bool, as_json: bool) -> None:
    """Check that every sample is there once, every byte right."""
    from tpufleet.workloads.activations import screens
    from tpufleet.workloads.activations.io import verification
    from tpufleet.workloads.activations.io.storage import open_storage

    storage = open_storage(out)
    report = verification.verify(storage, deep=not quick)
    screens.show_report(report, as_json=as_json)
    if sweep and report.committed == report.units:
        click.echo(
            f"deleted {len(verification.delete_leftovers(storage)):,} leftovers", err=as_json
        )
    elif sweep:
        click.echo("nothing was deleted: workers may still be writing", err=True)
    context.exit(0 if report.intact else 1)


for command in (
    cli_plan.plan,
    exchanging.export,
    exchanging.import_shards,
    exchanging.streams,
    exchanging.manifest,
):
    extract.add_command(command)
