"""The systemd unit of the documentation and that of `tpu deploy server` are hardened alike."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repository import ROOT

DOCUMENTED = ROOT / "docs/server.md"
DEPLOYED = ROOT / "packages/tpufleet/src/tpufleet/providers/tpu_vm/server.sh"
LOCAL_ONLY = {"StateDirectory", "StateDirectoryMode", "ReadWritePaths"}  # say where the state is
# Of 100, where a unit that says nothing has 92.
MOST_EXPOSED = 40


def unit(path: Path) -> str:
    return re.search(r"^\[Unit\]\n.*?WantedBy=\S+\n", path.read_text(), re.M | re.S)[0]


def service_settings(text: str) -> dict[str, str]:
    service = text.partition("[Service]\n")[2].partition("\n[Install]")[0]
    lines = [line for line in service.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_both_units_have_the_same_hardening():
    documented, deployed = (service_settings(unit(path)) for path in (DOCUMENTED, DEPLOYED))
    own = {"User", "Environment", "ExecStart", "WorkingDirectory", *LOCAL_ONLY}
    assert {name: value for name, value in documented.items() if name not in own} == {
        name: value for name, value in deployed.items() if name not in own
    }
    assert documented["NoNewPrivileges"] == "yes" and documented["ProtectSystem"] == "strict"


def test_the_deployed_server_may_write_its_state_only():
    assert service_settings(unit(DEPLOYED))["ReadWritePaths"] == "/var/lib/tpufleet-server"


@pytest.mark.parametrize("path", [DOCUMENTED, DEPLOYED], ids=["documented", "deployed"])
def test_systemd_finds_the_unit_little_exposed(path, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    file = tmp_path / "tpufleet-server.service"
    file.write_text(unit(path))
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
