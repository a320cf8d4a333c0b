"""Runs the steps of a job in a container image with Docker, on hosts whose operator allows it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpufleet.agent import threads
from tpufleet.errors import BadInput
from tpufleet.model.job.attempts import AttemptId

# What Google documents for containers that use TPUs: the host's network, and its devices.
# https://cloud.google.com/tpu/docs/run-in-container
# Newer chips are reached through VFIO, which locks memory: an image whose user is not root needs
# the limit raised. https://cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode
DEVICE_FLAGS = ("--privileged", "--ulimit=memlock=-1")
# On the server's own machine.
NO_RIGHTS = ("--cap-drop=ALL", "--security-opt=no-new-privileges")
SHARED_MEMORY = "16g"  # for data loaders; Docker's default is 64 MB
REMOVE_SECONDS = 60.0
# Docker reads environment files line by line, and refuses longer lines.
MAX_LINE_BYTES = 60 * 1024
# Of `docker run`, if Docker itself fails: nothing ran in the image.
# https://docs.docker.com/engine/containers/run/#exit-status
DOCKER_FAILED = 125
ERROR_PREFIX = "docker: "  # of the line that says why


class JobContainer:
    """The containers of one attempt, one for each step. They share its folder."""

    def __init__(self, image: str, attempt_id: AttemptId, path: str | None) -> None:
        docker = shutil.which("docker", path=path)
        if docker is None:
            raise BadInput(
                "image: docker is not installed on this host; on GKE, set the image with pod.image"
            )
        self._docker = docker
        self._image = image
        self._name = "tpufleet-" + hashlib.sha256(attempt_id.encode()).hexdigest()[:16]

    def wrap(
        self,
        argv: Sequence[str],
        *,
        folders: Sequence[Path],
        workdir: Path,
        user: tuple[int, int] | None,
    ) -> tuple[str, ...]:
        """The command that runs `argv` in the image, as `user` and without capabilities; None: as
        the user of the image, with the devices of the host. It reads the variables of the job from
        its standard input, see `environment_file`: in its arguments, others would see them, and in
        its own environment, some would change what it does, as LD_PRELOAD and DOCKER_HOST do."""
        mounts = [f"--volume={folder}:{folder}" for folder in folders]
        flags = DEVICE_FLAGS if user is None else (f"--user={user[0]}:{user[1]}", *NO_RIGHTS)
        return (
            self._docker, "run", "--rm", "--init", f"--name={self._name}", "--network=host",
            f"--shm-size={SHARED_MEMORY}", *flags, *mounts, f"--workdir={workdir}",
            "--env-file=/dev/stdin", f"--entrypoint={argv[0]}", self._image, *argv[1:],
        )  # fmt: skip

    def remove(self, environ: Mapping[str, str]) -> None:
        """Kill what is left: a client that was killed leaves its container behind."""
        try:
            subprocess.run(
                [self._docker, "rm", "--force", self._name],
                env=dict(environ), capture_output=True, timeout=REMOVE_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            threads.log(f"cannot remove container {self._name}: {error}")


def environment_file(variables: Mapping[str, str]) -> bytes:
    """As `docker run --env-file` reads it: lines NAME=value, without quotes.
    https://docs.docker.com/reference/cli/docker/container/run/#env"""
    for name, value in variables.items():
        length = len(value.encode(errors="surrogateescape"))
        if "\n" in value or "\r" in value or length > MAX_LINE_BYTES:
            raise BadInput(
                f"image: {name} has several lines, or more than {MAX_LINE_BYTES // 1024} KiB, "
                "which docker cannot pass on; encode it, for example with base64"
            )
    lines = [f"{name}={value}\n" for name, value in sorted(variables.items())]
    return "".join(lines).encode(errors="surrogateescape")
