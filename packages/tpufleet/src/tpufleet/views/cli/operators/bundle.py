"""`tpu deploy bundle`: build and upload what TPU hosts install."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from tpufleet import config
from tpufleet.errors import BadInput
from tpufleet.views.cli import config_file, output
from tpufleet.views.cli.output import json_option


@click.command(
    epilog="\b\nExamples:\n  tpu deploy bundle\n  tpu deploy bundle --bucket gs://my-bucket/fleet\n"
    "  tpu deploy bundle --output tpufleet-bundle.tar.gz\n"
)
@click.option("--bucket", metavar="URL", help="Where to upload it (default: the server's bucket).")
@click.option(
    "--output", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="Write it to a file instead of uploading it.",
)  # fmt: skip
@output.python_folder_option
@click.option("--arm64", is_flag=True, help="For hosts with ARM CPUs too; twice as large.")
@json_option
def bundle(bucket: str | None, file: Path | None, python_folder: Path | None, arm64: bool) -> None:
    """Build what TPU hosts install, and upload it.

    The bundle holds this version of tpufleet, the packages of its agent, its own Python and uv, for
    TPU VMs, whatever this machine is. Hosts verify its checksum and download nothing else. It never
    mixes with the Python of jobs.
    """
    # Its result may be what the config file lacks.
    settings, errors = config.load_valid(os.environ, Path.home())
    output.print_warnings(errors)
    bucket = bucket or settings.bucket
    if file is None and bucket is None:
        raise BadInput(
            "no bucket to upload the bundle to\n"
            f"  next: pass --bucket gs://BUCKET/FOLDER, or set bucket in {settings.config_file}"
        )
    from tpufleet.compose import host_bundle

    def report(line: str) -> None:
        click.echo(f"bundle: {line}", err=True)

    with tempfile.TemporaryDirectory(prefix="tpufleet-bundle-") as folder:
        target = file or Path(folder) / "bundle.tar.gz"
        built = host_bundle.build(target, python_folder=python_folder, arm64=arm64, report=report)
        size = target.stat().st_size
        where = str(target)
        if file is None:
            assert bucket is not None
            report(f"uploading {size / 2**20:.0f} MiB to {bucket}")
            where = host_bundle.upload(built, bucket)
    if output.as_json():
        output.print_json(
            {"bundle": where, "sha256": built.sha256, "size": size, "python": built.python,
             "packages": built.packages}
        )  # fmt: skip
        return
    click.echo(f"{where} ({size / 2**20:.0f} MiB, Python {built.python})")
    if file is not None:
        click.echo(
            f"sha256 {built.sha256}\n"
            "  next: copy it to a gs:// or https:// location that hosts can read"
        )
        return
    values = {"bundle": where, "bundle_sha256": built.sha256}
    # Only where the cloud project is in the file: it may be in the environment.
    section = "compute" if settings.tpu_vm is None and settings.compute is not None else "tpu_vm"
    if config_file.has(settings.config_file, section) and config_file.save(
        settings.config_file, {section: values}
    ):
        click.echo(
            f"wrote {section}.bundle and {section}.bundle_sha256 to {settings.config_file}\n"
            "  next: start `tpu serve`, or restart it"
        )
        return
    click.echo(
        f"next: set this in {settings.config_file}, then restart `tpu serve`\n"
        f"{section}:\n  bundle: {where}\n  bundle_sha256: {built.sha256}"
    )
