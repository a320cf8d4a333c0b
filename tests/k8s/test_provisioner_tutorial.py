"""The commands of docs/provisioner.md, "Try it", in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import markdown
from tpufleet_testbed.kubernetes import emulated_gke
from tpufleet_testbed.kubernetes.processes import ProcessRegistry


def commands() -> list[str]:
    page = (markdown.DOCS / "provisioner.md").read_text()
    section = page.partition("## Try it\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.S)
    return [line for block in blocks for line in block.splitlines() if not line.startswith("pip ")]


def run(lines: list[str], home: Path) -> str:
    """In bash with job control, which `kill %1` needs. Returns the output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("TPUFLEET_")},
        "TPUFLEET_HOME": str(home), "PATH": path,
    }  # fmt: skip
    script = "\n".join(
        (
            "set -m -e",
            # Each job is a process group, because of job control.
            "trap 'for job in $(jobs -p); do kill -- -$job || true; done' EXIT",
            # The default addresses may be taken by another provisioner on this machine.
            "tpu() { if [ $1 = provisioner ]; then shift; command tpu provisioner "
            '--metrics-bind-address 127.0.0.1:0 --health-probe-bind-address 127.0.0.1:0 "$@"; '
            'else command tpu "$@"; fi; }',
            *lines,
        )
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=markdown.ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def check(output: str) -> None:
    assert "jobset.jobset.x-k8s.io/example condition met" in output
    for reason in ("NodePoolCreationStarted", "NodePoolCreationSucceeded"):
        assert reason in output


@pytest.mark.slow
def test_the_commands_between_up_and_down_work(plane, tmp_path):
    (tmp_path / "cluster").symlink_to(plane.layout.folder)
    try:
        emulated_gke.start(plane)
        lines = [line for line in commands() if not re.match(r"tpu cluster local (up|down)", line)]
        check(run(lines, tmp_path))
    finally:
        plane.kubectl("delete", "jobset", "example", "--ignore-not-found")
        ProcessRegistry(plane.layout.folder).stop([emulated_gke.COMPONENT])
        plane.kubectl("delete", "nodes", "-l", "google.com/tpu-provisioner-jobset-name=example")


@pytest.mark.scale  # starts a cluster of its own
def test_the_whole_page_works(plane, tmp_path):
    lines = commands()
    assert lines[0] == "tpu cluster local up --gke" and lines[-1] == "tpu cluster local down"
    check(run(lines, tmp_path))
    assert not (tmp_path / "cluster").exists()
