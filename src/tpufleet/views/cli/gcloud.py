"""Commands on TPU VMs by ssh, through gcloud: for people, and for nodes without an agent."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence

from tpufleet.errors import BadInput


def ssh(
    name: str, zone: str, project: str | None, worker: str, command: Sequence[str] = ()
) -> list[str]:
    """The words of the gcloud command. The other end is a shell, so each word is quoted for it."""
    return ssh_script(name, zone, project, worker, shlex.join(command) or None)


def ssh_script(
    name: str, zone: str, project: str | None, worker: str, command: str | None
) -> list[str]:
    """The same with what a person wrote for the shell at the other end."""
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, f"--zone={zone}",
            f"--worker={worker}"]  # fmt: skip
    if project:
        argv.append(f"--project={project}")
    if command is not None:
        argv.append(f"--command={command}")
    return argv


def require_gcloud() -> None:
    if shutil.which("gcloud") is None:
        raise BadInput("gcloud is not installed; see cloud.google.com/sdk, or use `tpu exec`")


def run(argv: Sequence[str], within: float, given: str = "") -> tuple[int, str]:
    """Exit status, and all that was said. A command that takes too long has failed. What is given
    goes to its standard input: secrets must not be words of a command."""
    require_gcloud()
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=within, check=False,
            input=given,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        words = said.decode(errors="replace") if isinstance(said, bytes) else said
        return 124, f"{words}\nno answer within {within:g} s"
    return done.returncode, done.stdout + done.stderr
