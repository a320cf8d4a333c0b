"""The pages "First job on Google Cloud" and "TPUs on Compute Engine", word for word: every command
runs in a shell as it is written, from a project in which nothing is set up. Google Cloud is the
emulator, whose VM and TPU hosts run on this machine; pip, gcloud and uv are stand-ins. Once more,
TPU hosts are machines that have nothing, and uv is real but for the Python that it downloads."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests import fake_gcs
from tests.docs import markdown
from tests.views.server_machine import ServerMachine
from tpufleet.providers.local import processes
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import Latencies
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan, ComputeLatencies

PAGE, COMPUTE_PAGE = "first-job-on-google-cloud.md", "compute-engine.md"
# Enables APIs and creates buckets, by the same requests as the real one.
GCLOUD = f"""#!{sys.executable}
import json, os, sys, urllib.request
arguments = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write("gcloud " + " ".join(arguments) + "\\n")

def post(url, **body):
    headers = {{"Content-Type": "application/json"}}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))

project_api = os.environ["PROJECT_API"]
if arguments[:2] == ["services", "enable"]:
    post(f"{{project_api}}/services/v1/projects/my-project/services/{{arguments[2]}}:enable")
if arguments[:3] == ["storage", "buckets", "create"]:
    for root in (project_api + "/storage", os.environ["STORAGE_EMULATOR_HOST"]):
        post(f"{{root}}/storage/v1/b?project=my-project", name=arguments[3].removeprefix("gs://"))
"""
# The Python that it installs is the one that runs this test, with its packages.
UV = f"""#!{sys.executable}
import pathlib, sys
arguments = sys.argv[1:]
if arguments[:2] == ["python", "install"]:
    root = pathlib.Path(arguments[arguments.index("--install-dir") + 1], "cpython-3.12")
    (root / "bin").mkdir(parents=True)
    (root / "lib/python3.12").mkdir(parents=True)
    (root / "lib/python3.12/os.py").touch()
    python = root / "bin/python3"
    python.write_text('#!/bin/bash\\nexec "{sys.executable}" "$@"\\n')
    python.chmod(0o755)
"""
# It installs a Python that runs on machines that have none, and everything else as ever.
BARE_UV = f"""#!{sys.executable}
import os, shutil, sys
arguments = sys.argv[1:]
if arguments[:2] == ["python", "install"]:
    folder = arguments[arguments.index("--install-dir") + 1]
    shutil.copytree(os.environ["RELOCATABLE"], folder + "/cpython-3.12", symlinks=True)
else:
    os.environ.pop("UV", None)
    os.execv(os.environ["REAL_UV"], ["uv", *arguments])
"""


def commands_of(page: str) -> list[str]:
    """Every line of every shell block, in order, until nothing is left to pay for."""
    blocks = [block for block in markdown.blocks("sh") if block.where.startswith(f"docs/{page}")]
    assert len(blocks) >= 3
    lines = [line for block in blocks for line in block.text.splitlines()]
    return lines[: lines.index("tpu cost project") + 1]


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_a_newcomer_follows_the_page_to_a_finished_job(tmp_path, monkeypatch):
    check_first_job(walk(PAGE, tmp_path, monkeypatch, UV))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [PAGE, COMPUTE_PAGE])
def test_a_newcomer_follows_the_page_with_tpu_hosts_that_have_nothing(tmp_path, monkeypatch, page):
    from tests.providers.tpu_vm import ubuntu_host
    from tpufleet.agent import uv_tool

    ubuntu_host.ubuntu_root()
    monkeypatch.setenv("REAL_UV", uv_tool.find_uv())
    python = ubuntu_host.relocatable_python(tmp_path / "python")
    monkeypatch.setenv("RELOCATABLE", str(python))
    check = check_first_job if page == PAGE else check_multislice_job
    check(walk(page, tmp_path, monkeypatch, BARE_UV, bare=True))


@pytest.mark.slow
def test_a_newcomer_follows_the_page_to_a_multislice_job_on_instances(tmp_path, monkeypatch):
    check_multislice_job(walk(COMPUTE_PAGE, tmp_path, monkeypatch, UV))


def check_multislice_job(printed: dict[str, str]) -> None:
    [init] = [text for command, text in printed.items() if command.startswith("tpu init -")]
    fixes = [line for line in printed if line.startswith(("gcloud services", "gcloud storage"))]
    assert len(fixes) == 2 and all(f"next: {fix}" in init for fix in fixes)
    [check] = [text for command, text in printed.items() if command.startswith("tpu init check")]
    assert "everything is set up" in check
    [run] = [text for command, text in printed.items() if command.startswith("tpu run")]
    assert "2 × tpu7x-16" in run and "slice 0 of 2" in run and "succeeded" in run


def walk(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv: str, *, bare: bool = False
) -> dict[str, str]:
    """Along the page; `bare` TPU hosts have nothing. Returns what each command printed."""
    programs, home, work = tmp_path / "bin", tmp_path / "home", tmp_path / "work"
    for folder in (programs, home, work):
        folder.mkdir()
    executable(programs / "gcloud", GCLOUD)
    executable(programs / "uv", uv)
    executable(programs / "pip", "#!/bin/sh\n")
    executable(programs / "tpu", f'#!/bin/sh\nexec {sys.executable} -P -m tpufleet "$@"\n')
    with contextlib.ExitStack() as closing:
        storage = closing.enter_context(fake_gcs.server())
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage)
        emulator = Emulator(
            agents_folder=tmp_path / "machines",
            latencies=Latencies().divided_by(100),
            plan=CloudFaultPlan(
                compute=ComputeFaultPlan(latencies=ComputeLatencies().divided_by(100))
            ),
        )
        if bare:
            from tests.providers.compute.bare_vms import BareVms
            from tests.providers.tpu_vm.bare_hosts import BareHosts

            for kind in (BareHosts, BareVms):
                hosts = kind(tmp_path / kind.__name__, emulator, storage=storage)
                closing.callback(hosts.close)
        # An address of its own, so that the port on the page is free.
        address = "127." + ".".join(str(random.randint(2, 250)) for _ in range(3))
        machine = ServerMachine(tmp_path / "vm", address, storage)
        compute = emulator.project.compute
        compute.state.address = address
        compute.boot, compute.guest_attribute = machine.boot, machine.guest_attribute
        emulator.project.state.disabled_apis |= {"tpu.googleapis.com", "compute.googleapis.com"}
        emulator.project.state.missing.add("my-project-tpufleet")
        environ = {
            **{key: value for key, value in os.environ.items() if "TPUFLEET" not in key},
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "CALLS": str(tmp_path / "calls"),
            "PROJECT_API": emulator.project.url,
            "UV": str(programs / "uv"),
            "TPUFLEET_TPU_VM_ENDPOINT": emulator.endpoint,
            "TPUFLEET_COMPUTE_ENDPOINT": emulator.project.url,
        }
        environ.pop("XDG_CONFIG_HOME", None)
        try:
            with emulator:
                printed = follow(commands_of(page), environ, work, machine)
                nothing_is_paid_for(emulator)
        finally:
            machine.close()
    assert processes.leftovers(tmp_path / "machines") == []
    assert not compute.state.resources, "nothing of the server is left to pay for"
    return printed


def nothing_is_paid_for(emulator: Emulator) -> None:
    for cloud in (emulator.cloud, emulator.engine):
        with cloud.lock:
            cloud.run_due()
            assert not cloud.ledger.running(), "no TPU is left to pay for"


def check_first_job(printed: dict[str, str]) -> None:
    [init] = [text for command, text in printed.items() if command.startswith("tpu init -")]
    fixes = [line for line in printed if line.startswith(("gcloud services", "gcloud storage"))]
    assert len(fixes) == 3
    for fix in fixes:
        assert f"next: {fix}" in init, "the page has what `tpu init` prints"
    assert "tpu deploy server" in init
    [check] = [text for command, text in printed.items() if command.startswith("tpu init check")]
    assert "everything is set up" in check
    [run] = [text for command, text in printed.items() if command.startswith("tpu run")]
    assert "hello from a TPU host" in run and "succeeded" in run
    assert "estimate: $1.92 per hour" in run
    slices = printed["tpu inventory slices"]
    assert slices.startswith("no slices;") or all(
        line.split()[1] == "releasing" for line in slices.splitlines()[1:]
    ), slices


def follow(
    commands: list[str], environ: dict[str, str], work: Path, machine: ServerMachine
) -> dict[str, str]:
    """What each command printed."""
    printed = {}
    for command in commands:
        ran = subprocess.run(
            ["bash", "-c", command], env=environ, cwd=work, timeout=900, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed[command] = ran.stdout
        everything = "".join(f"$ {each}\n{text}" for each, text in printed.items())
        assert ran.returncode == 0, everything + machine.log()
    return printed
