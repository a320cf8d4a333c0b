"""`tpu extract run`: one worker. It waits for what is imported here, so JAX comes late."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from tpufleet import runtime
from tpufleet.errors import BadInput, together
from tpufleet_activations import plans
from tpufleet_activations.cli import output
from tpufleet_activations.cli.group import INTERRUPTED
from tpufleet_activations.cli.parameter_types import (
    COUNT,
    SECONDS,
    json_option,
    location_options,
)
from tpufleet_activations.formatting import example_epilog
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import DiskUnusable, Storage, translate_disk_errors
from tpufleet_activations.pipeline import dataset_status

if TYPE_CHECKING:
    from tpufleet_activations.pipeline.progress_meter import Meter

TERMINATED = 143  # exit status after SIGTERM, by shell convention


@click.command(epilog=example_epilog("tpu extract run acts"))
@click.argument("out")
@location_options
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
    help="Processes that tokenize; 0: one thread.  [default: 2 to 8, with 8 cores or more; else 0]",
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
    "accelerators, once for each model; if given, again, and other sizes in short runs too]",
)
@click.option(
    "--writers",
    type=COUNT,
    help="Threads that hash and write.  [default: one for each core, 8 to 32]",
)
@click.option(
    "--stream",
    default="",
    metavar="ADDRESS",
    help="Send rows to the programs that read from unix:/PATH or tcp://HOST:PORT, and store none.",
)
@click.option(
    "--credentials",
    help="Folder with the certificate and token of a tcp:// stream; created if it does not exist.",
)
@click.option("--worker", default="", help="Name of this worker, unique among running workers.")
@json_option
@click.option("--quiet", is_flag=True, help="Do not show progress.")
@click.pass_context
def run(context: click.Context, out: str, **options: Any) -> None:
    """Run the plan in OUT until it is complete. Any number of workers can run concurrently."""
    if options["credentials"] and not options["stream"]:
        raise BadInput(together("--credentials", "--stream"))
    if runtime.context().num_processes == 1:  # JAX has a handler of its own in larger groups
        runtime.install_stop_handler()
    storage = open_storage(out)
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
    stopped = runtime.should_stop() and (bool(options["stream"]) or not meter.complete)
    output.show_end(meter, as_json=options["as_json"], stopped=stopped)
    if stopped:
        output.show_resume("stopped", out)
        context.exit(TERMINATED)


def _run(
    storage: Storage,
    planned: plans.ExtractionPlan,
    out: str,
    on_progress: Callable[[Meter], None],
    options: Mapping[str, Any],
) -> Meter | None:
    """None if there is nothing to do."""
    stream = options["stream"]
    try:
        with translate_disk_errors(storage):
            if not stream:
                storage.staging()  # finds a read-only disk before the model is loaded
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
    if alone and not stream and dataset_status.DatasetMonitor(storage).complete():
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
    devices.start(mesh, weight_bytes=planned.weight_bytes())
    from tpufleet_activations.pipeline import extraction, workers

    steal = options["steal_after"]
    settings = extraction.ExtractionSettings(
        mesh=mesh,
        scope=options["scope"],
        memory=options["memory"],
        lease=timedelta(seconds=options["lease"]),
        steal_after=None if steal is None else timedelta(seconds=steal),
        compile_cache=options["compile_cache"],
        calibrate=options["calibrate"],
        name=options["worker"],
        stream=stream,
        credentials=options["credentials"],
        options=workers.default_options(
            os.cpu_count() or 1, preparers=options["preparers"], writers=options["writers"]
        ),
    )
    return extraction.run(
        storage, settings, model=options["model"], data=options["data"], on_progress=report
    )
