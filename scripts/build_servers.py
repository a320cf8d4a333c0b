"""Build the programs that integration tests start, once for each version, into the user's cache.

`scripts/build_servers.py [NAME...]`; needs Go. Tests that need one which is not there skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpufleet_gke.environment.terraform.versions import OPENTOFU_VERSION
from tpufleet_testbed.kubernetes import binaries

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpufleet/servers"
# Module and version, the folder of the program in it, and about how many minutes it takes.
SERVERS = {
    "fake-gcs-server": ("github.com/fsouza/fake-gcs-server", "v1.56.1", ".", 2),
    "helm": ("helm.sh/helm/v3", "v3.18.6", "./cmd/helm", 3),
    "tofu": ("github.com/opentofu/opentofu", f"v{OPENTOFU_VERSION}", "./cmd/tofu", 6),
}
CONTROL_PLANE = "control-plane"


def cached(name: str) -> Path:
    """Where the program is, once it is built."""
    return CACHE / f"{name}-{SERVERS[name][1]}"


def find(name: str) -> str | None:
    """Of this machine, or built."""
    path = cached(name)
    return str(path) if path.exists() else shutil.which(name)


def build(name: str) -> None:
    if name == CONTROL_PLANE:
        binaries.ensure(say)
        return
    module, version, folder, minutes = SERVERS[name]
    if cached(name).exists():
        return
    say(f"Building {name} {version} (once, about {minutes} minutes)")
    subprocess.run(["go", "mod", "download", f"{module}@{version}"], check=True, cwd="/")
    listed = ["go", "env", "GOMODCACHE"]
    modules = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.strip()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as draft:
        # `go install` refuses modules with replace directives, so a copy is built.
        source = Path(draft, "source")
        shutil.copytree(Path(modules, f"{module}@{version}"), source, copy_function=shutil.copyfile)
        command = ["go", "build", "-o", f"{draft}/{name}", folder]
        subprocess.run(command, check=True, cwd=source, env={**os.environ, "CGO_ENABLED": "0"})
        Path(draft, name).rename(cached(name))


def say(message: str) -> None:
    print(message, file=sys.stderr)


def main(names: Sequence[str]) -> int:
    if shutil.which("go") is None:
        say("go not found; tests that need servers are skipped")
        return 0
    failed = []
    for name in names or (*SERVERS, CONTROL_PLANE):
        try:
            build(name)
        except (subprocess.CalledProcessError, binaries.ControlPlaneBuildError) as error:
            say(f"{name} was not built: {error}")
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
