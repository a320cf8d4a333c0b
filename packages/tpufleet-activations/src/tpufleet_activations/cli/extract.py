"""`tpu extract`: the command group, and its run, status, show, verify and repair commands."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError, install_command
from tpufleet.runtime.units import DamagedRecord
from tpufleet_activations.cli import plan
from tpufleet_activations.cli.interrupts import delivered_interrupts
from tpufleet_activations.cli.parameter_types import COUNT, SECONDS
from tpufleet_activations.formatting import extract_command
from tpufleet_migration.activations import commands
from tpufleet_migration.activations.commands import example_epilog

if TYPE_CHECKING:
    from tpufleet_activations.io.storage import Storage
    from tpufleet_activations.pipeline.progress_meter import Meter
    from tpufleet_activations.plans import ExtractionPlan

INTERRUPTED, TERMINATED = 130, 143  # exit status after SIGINT and SIGTERM, by shell convention
# Options of the older scripts that have another name now.
LEGACY_OPTIONS = {
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


# What an interrupted command leaves, by name. `run` says more, and `status --watch` ends so.
STATE_AFTER_INTERRUPT = {
    "plan": "the plan may be missing; run `tpu extract plan` again",
    "verify": "the dataset is unchanged",
    "stats": "the dataset is unchanged",
    "show": "the dataset is unchanged",
    "repair": "units that were reopened are extracted by `tpu extract run`, or another repair",
    "export": "the export is incomplete; run it again, which replaces its files",
    "import": "units that are imported are kept; run the import again",
    "streams": "the streams may be incomplete; run it again with --overwrite",
}


class InvalidInput(click.ClickException):
    """With the exit status that every command has for it."""

    exit_code = 2


class ExtractGroup(click.Group):
    """Shows FleetError as a message instead of a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            with delivered_interrupts():
                return super().invoke(context)
        except KeyboardInterrupt:
            state = STATE_AFTER_INTERRUPT.get(context.invoked_subcommand or "")
            if state is None:
                raise
            click.echo(f"\ninterrupted; {state}", err=True)
            context.exit(INTERRUPTED)
        except DamagedRecord as error:
            raise click.ClickException(
                f"{error}; run `tpu extract repair` with the folder of the dataset"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
                raise click.ClickException(
                    "no space left on device, perhaps for downloads or temporary files; free some, "
                    "or set XDG_CACHE_HOME and TMPDIR to folders on a larger disk"
                ) from error
            if error.filename is None:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        except BadInput as error:
            raise InvalidInput(str(error)) from error
        except FleetError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"{error.name} is not installed\n  next: {install_command('tpufleet[extract]')}"
            ) from error


def _normalize_option(name: str) -> str:
    """The older scripts spelled options with underscores, and some had other names."""
    name = name.replace("_", "-")
    return LEGACY_OPTIONS.get(name, name)


@click.group(cls=ExtractGroup, context_settings={"token_normalize_func": _normalize_option})
def extract() -> None:
    """Extract activations of a language model, each sample exactly once."""


@extract.command(epilog=example_epilog("tpu extract run acts"))
@click.argument("out")
@click.option("--model", help="Location of the model, if it differs from the plan's.")
@click.option("--data", help="Location of the data, if it differs from the plan's.")
@click.option(
    "--mesh", default="", help="Such as data=2,fsdp=1,tensor=4.  [default: all devices on data]"
)
@click.option(
    "--scope",
    type=click.Choice(["local", "global"]),
    default="local",
    show_default=True,
    help="Build the mesh from this process's devices, or from those of all hosts.",
)
@click.option(
    "--compute",
    type=click.Choice(["bf16", "f32"]),
    help="Must equal the plan's; only plans of 0.1.0 need it.",
)
@click.option(
    "--memory",
    type=click.Choice(["auto", "pinned", "plain"]),
    default="auto",
    show_default=True,
    help="Host memory for activations: page-locked, pageable, or chosen by platform.",
)
@click.option(
    "--lease",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds without heartbeat until a worker's units are taken over.",
)
@click.option(
    "--steal-after", type=SECONDS, help="Seconds until a slow worker's unit is taken over too."
)
@click.option(
    "--preparers",
    type=click.IntRange(0),
    help="Processes that tokenize; 0: one thread.  [default: 2 with 8 cores or more, else 0]",
)
@click.option(
    "--compile-cache",
    help="Folder of compiled programs, kept for the next run; '' for none.  "
    "[default: ~/.cache/tpufleet/compile, on CPUs none]",
)
@click.option(
    "--calibrate/--no-calibrate",
    default=None,
    help="Measure the devices to choose the size and number of batches.  [default: on "
    "accelerators; other sizes than the plan's only in runs of half an hour or more, or if given]",
)
@click.option(
    "--writers",
    type=COUNT,
    help="Threads that hash and write.  [default: one for each core, 8 to 32]",
)
@click.option(
    "--disk",
    type=click.Choice(["auto", "direct", "buffered"]),
    default="auto",
    show_default=True,
    help="Write shards past the page cache (O_DIRECT) or through it; auto: past it, where the "
    "file system allows.",
)
@click.option("--worker", default="", help="Name of this worker, unique among running workers.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON at the end.")
@click.option("--quiet", is_flag=True, help="Do not show progress.")
@click.pass_context
def run(context: click.Context, out: str, **options: Any) -> None:
    """Run the plan in OUT until it is complete. Any number of workers can run concurrently."""
    from tpufleet import runtime
    from tpufleet_activations import plans
    from tpufleet_activations.cli import output
    from tpufleet_activations.io.storage import open_storage

    if runtime.context().num_processes == 1:  # JAX has a handler of its own in larger groups
        runtime.install_stop_handler()
    storage = open_storage(out, disk=options["disk"])
    planned = plans.load(storage)
    meters: list[Meter] = []
    try:
        meter = _run(storage, planned, out, meters.append, options)
    except KeyboardInterrupt:
        last = meters[-1] if meters else None
        output.show_interrupted(planned, storage, out, as_json=options["as_json"], meter=last)
        context.exit(INTERRUPTED)
    if meter is None:
        return
    stopped = runtime.should_stop() and not meter.complete
    output.show_end(meter, as_json=options["as_json"], stopped=stopped)
    if stopped:
        resume = extract_command("run", out)
        click.echo(f"stopped; committed units are kept. Resume with {resume}", err=True)
        context.exit(TERMINATED)


def _run(
    storage: Storage,
    planned: ExtractionPlan,
    out: str,
    on_progress: Callable[[Meter], None],
    options: Mapping[str, Any],
) -> Meter | None:
    """None if there is nothing to do."""
    from tpufleet import runtime
    from tpufleet_activations.cli import output
    from tpufleet_activations.io.storage import DiskUnusable, translate_disk_errors
    from tpufleet_activations.pipeline import dataset_status

    try:
        with translate_disk_errors(storage):
            storage.write_mode()  # finds missing disks before the model is loaded
            storage.staging()  # and those that are read-only
    except DiskUnusable:
        if not dataset_status.DatasetMonitor(storage).complete():
            raise
        output.show_complete(planned, out, as_json=options["as_json"])
        return None
    if options["mesh"]:
        from tpufleet_activations.model import meshes

        meshes.parse_mesh(options["mesh"])
    # Processes of a gang join each other first: one may see the last commit, and others not yet.
    alone = runtime.context().num_processes == 1 and options["scope"] == "local"
    if alone and dataset_status.DatasetMonitor(storage).complete():
        samples = planned.samples
        runtime.progress(samples, total=samples, checkpoint_step=samples)
        output.show_complete(planned, out, as_json=options["as_json"])
        return None
    screen = None
    if not options["quiet"]:
        output.show_start(planned, options["model"] or planned.model)
        screen = output.ProgressLine()

    def report(meter: Meter) -> None:
        on_progress(meter)
        if screen is not None:
            screen(meter)

    # JAX, which takes a second to import; then the devices, which start during other imports.
    from tpufleet_activations.model import devices, meshes

    runtime.initialize()
    mesh = meshes.parse_mesh(options["mesh"])
    devices.start(mesh, weight_bytes=planned.weight_bytes(options["compute"]))
    from tpufleet_activations.pipeline import extraction, workers

    steal = options["steal_after"]
    settings = extraction.ExtractionSettings(
        compute=options["compute"],
        mesh=mesh,
        scope=options["scope"],
        memory=options["memory"],
        lease=timedelta(seconds=options["lease"]),
        steal_after=None if steal is None else timedelta(seconds=steal),
        compile_cache=options["compile_cache"],
        calibrate=options["calibrate"],
        name=options["worker"],
        options=workers.default_options(
            os.cpu_count() or 1, preparers=options["preparers"], writers=options["writers"]
        ),
    )
    return extraction.run(
        storage, settings, model=options["model"], data=options["data"], on_progress=report
    )


@extract.command(epilog=example_epilog("tpu extract status acts --watch 5"))
@click.argument("outs", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--watch", type=SECONDS, help="Refresh every this many seconds, until all are complete."
)
def status(outs: tuple[str, ...], as_json: bool, watch: float | None) -> None:
    """Show the progress of datasets and their workers."""
    from tpufleet_activations.cli import output
    from tpufleet_activations.io.storage import open_storage

    output.watch_status({out: open_storage(out) for out in outs}, as_json=as_json, every=watch)


@extract.command(epilog=example_epilog("tpu extract show acts 17"))
@click.argument("out")
@click.argument("sample", type=click.IntRange(0))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(out: str, sample: int, as_json: bool) -> None:
    """Show the metadata of a stored sample and a summary of its activations."""
    from tpufleet_activations.cli import output
    from tpufleet_activations.io import datasets

    output.show_sample(datasets.open_dataset(out), sample, as_json=as_json)


@extract.command(epilog=example_epilog("tpu extract stats acts"))
@click.argument("out")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def stats(out: str, as_json: bool) -> None:
    """Show statistics of each site: mean, norm, largest value, values that are not finite.

    They were gathered while the activations were written; nothing is read but the records.
    """
    from tpufleet_activations.cli import output
    from tpufleet_activations.io import datasets

    output.show_statistics(datasets.open_dataset(out), as_json=as_json)


@extract.command(epilog=example_epilog("tpu extract verify acts"))
@click.argument("out")
@click.option("--quick", is_flag=True, help="Check records and sizes only, not checksums.")
@click.option(
    "--sweep",
    is_flag=True,
    help="Delete shards left by dead workers or replaced by repairs, if complete.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def verify(context: click.Context, out: str, quick: bool, sweep: bool, as_json: bool) -> None:
    """Check that every sample is stored exactly once and all checksums match."""
    from tpufleet_activations.cli import output
    from tpufleet_activations.io import verification
    from tpufleet_activations.io.storage import open_storage

    storage = open_storage(out)
    report = verification.verify(storage, deep=not quick)
    output.show_report(report, out, as_json=as_json)
    if sweep and report.committed == report.units:
        click.echo(
            f"deleted {len(verification.delete_leftovers(storage)):,} leftovers", err=as_json
        )
    elif sweep:
        click.echo("nothing deleted: units are missing, workers may still be writing", err=True)
    context.exit(0 if report.intact else 1)


@extract.command(epilog=example_epilog("tpu extract repair acts"))
@click.argument("out")
@click.option("--quick", is_flag=True, help="Find bad units by records and sizes only.")
@click.option(
    "--reopen-only", is_flag=True, help="Return bad units to the queue; workers rebuild them."
)
@click.option("--model", help="Location of the model, if it differs from the plan's.")
@click.option("--data", help="Location of the data, if it differs from the plan's.")
@click.pass_context
def repair(
    context: click.Context,
    out: str,
    quick: bool,
    reopen_only: bool,
    model: str | None,
    data: str | None,
) -> None:
    """Find damaged units of OUT and extract them again. Good units are not changed."""
    from tpufleet import runtime
    from tpufleet_activations.cli import output
    from tpufleet_activations.io import verification
    from tpufleet_activations.io.storage import open_storage, translate_disk_errors
    from tpufleet_activations.pipeline import extraction

    storage = open_storage(out)
    report = verification.verify(storage, deep=not quick)
    for problem in report.problems:
        click.echo(f"  problem: {problem}")
    if not report.bad_units:
        missing = report.units - report.committed
        hint = (
            f"; {missing:,} are not committed yet, run {extract_command('run', out)}"
            if missing
            else ""
        )
        by = "" if report.checksums else " by records and sizes; checksums were not checked"
        click.echo(f"no damaged units{by}{hint}")
        return
    with translate_disk_errors(storage):
        reopened = verification.reopen(storage, report.bad_units)
    click.echo(f"reopened {len(reopened):,} of {report.units:,} units")
    if reopen_only:
        click.echo(f"rebuild them with {extract_command('run', out)}, on any number of machines")
        return
    runtime.initialize()
    settings = extraction.ExtractionSettings(compute=report.compute or None)
    meter = extraction.run(
        storage, settings, model=model, data=data, on_progress=output.ProgressLine()
    )
    output.show_end(meter)
    after = verification.verify(storage, deep=not quick, only=report.bad_units)
    output.show_report(after, out, as_json=False)
    if after.intact and after.replaced:
        click.echo(f"delete the damaged shards with {extract_command('verify', '--sweep', out)}")
    context.exit(0 if after.intact else 1)


@extract.command(epilog=example_epilog("tpu extract stripe /mnt/a/acts /mnt/b/acts /mnt/c/acts"))
@click.argument("out")
@click.argument("folders", nargs=-1)
@click.option(
    "--without",
    "unwanted",
    multiple=True,
    metavar="FOLDER",
    help="Leave out this folder, whose disk is lost, whose shards were moved, or that was added by "
    "mistake; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def stripe(out: str, folders: tuple[str, ...], unwanted: tuple[str, ...], as_json: bool) -> None:
    """Divide the shards of OUT among OUT and FOLDERS, on several disks; or show its folders.

    FOLDERS are all folders besides OUT. Shards that are stored stay where they are; new ones go to
    all folders in turn. After a disk was lost, leave out its folder or name all that are in use,
    then run `tpu extract repair OUT`.
    """
    from tpufleet_activations.cli import output
    from tpufleet_activations.io import striped_folder
    from tpufleet_activations.io.storage import translate_disk_errors

    if folders and unwanted:
        raise click.UsageError("name the folders in use, or those to leave out with --without")
    storage = striped_folder.local_folder(out)
    unchanged = f"the folders of {out} are unchanged"
    with translate_disk_errors(storage, unchanged):
        if unwanted:
            storage = striped_folder.leave_out(storage, unwanted)
        elif folders:
            storage = striped_folder.set_folders(storage, folders)
    output.show_stripes(striped_folder.stripes(storage), as_json=as_json)


for command in (
    plan.plan,
    commands.export,
    commands.import_shards,
    commands.streams,
    commands.manifest,
):
    extract.add_command(command)
