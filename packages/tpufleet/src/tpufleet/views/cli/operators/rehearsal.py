"""`tpu init --dry-run`: every step to a first job, on an emulator and in a temporary folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import FleetError

SPEED = "60"
COMMAND = "print('hello from a TPU host')"
PROGRAM = (sys.executable, "-P", "-m", "tpufleet")


def run(document: dict[str, Any], accelerator: str) -> int:
    """The exit status of the first step that fails; 0 when the job succeeded."""
    with tempfile.TemporaryDirectory(prefix="tpufleet-init-") as folder:
        root = Path(folder)
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TPUFLEET_")},
            "TPUFLEET_HOME": str(root / "state"),
            "TPUFLEET_CONFIG": str(root / "config.yaml"),
        }
        (root / "config.yaml").touch()
        emulator = subprocess.Popen(
            [*PROGRAM, "emulator", "--listen", "127.0.0.1:0", "--speed", SPEED],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            _write_config(root / "config.yaml", document, _endpoints(emulator))
            work = root / "work"
            work.mkdir()
            return _steps(environ, work, accelerator)
        finally:
            subprocess.run([*PROGRAM, "serve", "--stop", "--all"], env=environ, capture_output=True)
            emulator.terminate()
            emulator.wait()


def _endpoints(emulator: subprocess.Popen[str]) -> dict[str, str]:
    """By section of a config file, which the emulator prints with each."""
    assert emulator.stdout is not None
    found: dict[str, str] = {}
    for section in ("tpu_vm", "compute"):
        line = emulator.stdout.readline()  # Cloud TPU API at HOST:PORT (…)
        if " at " not in line:
            raise FleetError("the emulator did not start; run `tpu emulator` to see why")
        found[section] = line.partition(" at ")[2].split()[0]
    return found


def _write_config(file: Path, document: dict[str, Any], endpoints: dict[str, str]) -> None:
    import yaml

    # Without the bucket and the public URL: emulated hosts run on this machine.
    emulated = {
        section: {**document[section], "endpoint": endpoint}
        for section, endpoint in endpoints.items()
        if section in document
    }
    file.write_text(yaml.safe_dump(emulated, sort_keys=False))
    click.echo("the config file would be (this rehearsal runs without the bucket):\n")
    for line in yaml.safe_dump(document, sort_keys=False).splitlines():
        click.echo(f"  {line}")
    click.echo()


def _steps(environ: dict[str, str], work: Path, accelerator: str) -> int:
    for step in (
        ["init", "check", "--type", accelerator],
        ["run", accelerator, "--spot", "--max-cost", "5", "--", "python", "-c", COMMAND],
        ["cost"],
    ):
        click.echo(f"$ {shlex.join(['tpu', *step])}")
        status = subprocess.run([*PROGRAM, *step], env=environ, cwd=work).returncode
        click.echo()
        if status != 0:
            return status
    click.echo("dry run: this was an emulator; nothing was written and nothing was paid for")
    click.echo("  next: `tpu init` without --dry-run")
    return 0
