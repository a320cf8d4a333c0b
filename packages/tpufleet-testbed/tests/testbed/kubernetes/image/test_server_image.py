"""Our images in real containers: non-root, read-only, with what they are for; the server starts
quickly."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.polling import wait_until
from tests.ports import free_port
from tests.repository import ROOT
from tpufleet_testbed.kubernetes.image import builder

PROGRAMS = ("containerd", "ctr", "runc", "debootstrap")
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)),
        reason=f"needs root and {', '.join(PROGRAMS)}",
    ),
]
USER = 65532
CONFIG = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{folder}/containerd.sock"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A containerd of our own."""

    folder: Path

    def ctr(self, *arguments: str) -> str:
        command = ["ctr", "--address", str(self.folder / "containerd.sock"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    with (tmp_path / "containerd.log").open("wb") as log:
        command = ["containerd", "--config", str(tmp_path / "config.toml")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until((tmp_path / "containerd.sock").exists, 60, "containerd listens")
        yield Engine(folder=tmp_path)
    finally:
        process.terminate()
        process.wait(900)


@pytest.mark.slow
def test_the_server_starts_within_two_seconds_without_root_on_a_read_only_disk(engine):
    image = builder.build(arguments={"REQUIREMENTS": builder.VARIANTS["server"]})

    archive, work, port = engine.folder / "image.tar", engine.folder / "work", free_port()
    name = f"server-{uuid.uuid4().hex[:8]}"  # of all that run on this machine
    with archive.open("wb") as out:
        image.write(out)
    engine.ctr("images", "import", str(archive))
    work.mkdir()
    os.chown(work, USER, USER)
    engine.ctr(
        "run", "--detach", "--read-only", "--net-host",
        "--mount", f"type=bind,src={work},dst=/data,options=rbind:rw",
        "--mount", "type=tmpfs,dst=/tmp,options=mode=1777",
        "--env", "TPUFLEET_HOME=/data/state",
        image.reference, name, "tpu", "serve", "--listen", f"127.0.0.1:{port}",
    )  # fmt: skip
    try:
        (pid,) = [
            int(line.split()[1])
            for line in engine.ctr("tasks", "ls").splitlines()
            if line.startswith(f"{name} ")
        ]

        def answers() -> bool:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz").status == 200
            except urllib.error.URLError:
                return False

        wait_until(answers, 120, "the server answers")
        process = psutil.Process(pid)
        used = process.cpu_times()
        # Of the CPU, so that other programs on the machine do not count.
        assert used.user + used.system < 2.0
        assert process.uids().real == USER
        assert "ro," in next(
            line.split()[5] + ","
            for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
            if line.split()[4] == "/"
        )
        print(f"\nimage {sum(layer.size for layer in image.layers) / 1e6:.0f} MB, "
              f"started in {used.user + used.system:.2f} s of CPU")  # fmt: skip
    finally:
        engine.ctr("tasks", "kill", "--signal", "SIGKILL", name)
        wait_until(lambda: "RUNNING" not in engine.ctr("tasks", "ls"), 60, "it has ended")
        engine.ctr("tasks", "delete", name)
        engine.ctr("containers", "delete", name)


# What pods run in each image, with examples/ at /examples.
EXTRACTION = """
cd /examples/extract
python -c 'import pathlib, small; small.write_model(pathlib.Path("/tmp"))'
echo '{"text": "the cat sat on a mat"}' >/tmp/texts.jsonl
tpu extract plan /tmp/out --model /tmp --data /tmp/texts.jsonl
tpu extract run /tmp/out
tpu extract verify /tmp/out
"""
PROGRAMS_OF = {
    "agent": ("python -c 'import tpufleet.agent.pod_entrypoint, jax; print(jax.devices())'", "Cpu"),
    "tpu": (EXTRACTION, "OK: every sample stored exactly once"),
    "trainer": (
        "python /examples/llama/pretrain.py steps=3 every=2 batch=4 length=8",
        "'steps': 3",
    ),
}
# As the user of the image, on a disk that it cannot write to.
CHECKED = f"test $(id -u) = {USER}; ! touch /opt/x 2>/tmp/error; cat /tmp/error; cd /tmp;"


@pytest.mark.scale  # 2 GB of packages
@pytest.mark.parametrize("variant", PROGRAMS_OF)
def test_a_variant_runs_its_programs_without_root_on_a_read_only_disk(engine, variant):
    image = builder.build(arguments={"REQUIREMENTS": builder.VARIANTS[variant]})
    archive = engine.folder / "image.tar"
    with archive.open("wb") as out:
        image.write(out)
    engine.ctr("images", "import", str(archive))
    archive.unlink()
    command, expected = PROGRAMS_OF[variant]
    printed = engine.ctr(
        "run", "--rm", "--read-only", "--mount", "type=tmpfs,dst=/tmp,options=mode=1777",
        "--mount", f"type=bind,src={ROOT / 'examples'},dst=/examples,options=rbind:ro",
        "--env", "JAX_PLATFORMS=cpu",
        image.reference, f"{variant}-{uuid.uuid4().hex[:8]}", "sh", "-ec", CHECKED + command,
    )  # fmt: skip
    assert "Read-only file system" in printed and expected in printed, printed
    size = sum(layer.size for layer in image.layers) / 1e6
    print(f"\nimage {variant}: {size:.0f} MB: {printed.strip()}")
