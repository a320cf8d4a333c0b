"""`tpu backup` and `tpu backup restore`: everything that a server needs to go on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpufleet.errors import Conflict
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.compose.backup import BackupReport


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu backup fleet-2026-01-31.tar.gz\n"
    "  tpu backup --with logs --with checkpoints full.tar.gz\n  tpu backup --check full.tar.gz\n",
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--with",
    "optional",
    multiple=True,
    type=click.Choice(["logs", "checkpoints"]),
    help="Include these files too; repeatable.",
)
@click.option("--check", is_flag=True, help="Check the checksums of an existing backup instead.")
@json_option
def backup(file: Path, optional: tuple[str, ...], check: bool) -> None:
    """Write a backup of the server on this machine to FILE (tar.gz, mode 600).

    It has the database at one moment, code, results, secrets and keys; not what is in a bucket, and
    logs and checkpoints only with --with. Servers may run meanwhile. The file contains credentials:
    keep it private. The database is that of the config file or of TPUFLEET_STORE.
    """
    from tpufleet.compose import backup as backups

    settings = connection.settings()
    if check:
        report = backups.verify(file)
        output.print_result(report, f"complete: {_describe(report)}")
        return
    report = backups.create(settings, settings.store_url, file, optional)
    if report.skipped:
        names = "\n  ".join(report.first_skipped)
        output.print_status(f"warning: skipped {report.skipped} files or folders:\n  {names}")
    message = f"wrote {_describe(report)}\n  next: restore it with `tpu backup restore {file}`"
    output.print_result(report, message)


@backup.command(
    epilog="\b\nExample:\n  TPUFLEET_HOME=/srv/fleet tpu backup restore fleet-2026-01-31.tar.gz\n",
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
def restore(file: Path) -> None:
    """Restore the backup FILE into an empty state folder and an empty database.

    Checks the checksums first. Stop the server that the backup was made of before the new one is
    started: both would control the same slices. Running jobs continue when a server with the same
    address is started, as far as their hosts still exist. A backup of an earlier version is
    migrated.
    """
    from tpufleet.compose import backup as backups

    settings = connection.settings()
    report = backups.restore(settings, settings.store_url, file)
    message = f"restored {_describe(report)}\n  into {settings.home}\n"
    message += "  next: tpu serve"
    try:
        with backups.original_stopped(settings.home):
            pass
    except Conflict as error:
        output.print_warnings([error])
    output.print_result(report, message)


def _describe(report: BackupReport) -> str:
    made = f"{report.created_at:%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"{report.file}: {text.size(report.size)}, {report.rows} rows, {report.files} files\n"
        f"  made: {made}, by tpufleet {report.version} (schema {report.schema})\n"
        f"  sha256: {report.sha256}"
    )
