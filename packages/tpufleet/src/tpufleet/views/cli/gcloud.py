"""Commands on TPU VMs with ssh, through gcloud: for users, and for nodes without an agent."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import click

from tpufleet.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAddress:
    name: str
    zone: str
    project: str = ""
    is_instance: bool = False  # of Compute Engine, not a TPU VM

    def ssh(self, worker: str, command: Sequence[str] | str | None = None) -> list[str]:
        """The argument vector of gcloud. The remote side is a shell: a text is a line for it, and
        the words of a sequence are quoted for it."""
        line = command if isinstance(command, str) else shlex.join(command or ()) or None
        argv = ["gcloud", "compute", "ssh", self.name, f"--zone={self.zone}"]
        if not self.is_instance:
            argv[2:2] = ["tpus", "tpu-vm"]
            argv.append(f"--worker={worker}")
        if self.project:
            argv.append(f"--project={self.project}")
        return argv if line is None else [*argv, f"--command={line}"]


@dataclass(frozen=True, slots=True)
class SshResult:
    status: int
    output: str  # standard output, then standard error
    timed_out: bool = False


def replace_process(argv: list[str], dry_run: bool) -> None:
    """With gcloud; or only show the command."""
    if dry_run:
        click.echo(shlex.join(argv))
        return
    require_gcloud()
    os.execvp(argv[0], argv)


def require_gcloud() -> None:
    if shutil.which("gcloud") is None:
        raise BadInput(
            "gcloud is not installed\n"
            "  next: install it from https://cloud.google.com/sdk, or use `tpu exec`"
        )


def run(argv: Sequence[str], timeout: float, stdin: str = "") -> SshResult:
    """Secrets go through standard input: the arguments of a process are visible to others."""
    require_gcloud()
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
            input=stdin,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return SshResult(124, output, timed_out=True)
    return SshResult(done.returncode, done.stdout + done.stderr)
