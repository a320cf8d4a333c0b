"""Diagnoses one host: `python -m tpufleet.agent.diagnostics [--repair]` prints a JSON report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tpufleet.agent.workload import containment
from tpufleet.agent.workload.environment import RUN_DIR_VARIABLE
from tpufleet.model.encoding import to_json
from tpufleet.model.host_commands import CheckResult, DiagnosticReport, Health

LIBTPU_LOCKFILE = "tmp/libtpu_lockfile"
# Fractions of a disk, and of the memory, that are free.
DISK_WARNING, DISK_FAILED = 0.10, 0.02
MEMORY_WARNING = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedHost:
    """The host to diagnose; tests pass another root."""

    root: Path = Path("/")
    environ: Mapping[str, str]
    repair: bool = False

    @property
    def chips(self) -> int:
        value = self.environ.get("TPUFLEET_CHIPS", "")
        return int(value) if value.isdecimal() else 0

    @property
    def simulated(self) -> bool:
        return self.environ.get("TPUFLEET_PLATFORM") == "cpu"

    def devices(self) -> list[Path]:
        dev = self.root / "dev"
        return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])


def run_checks(host: InspectedHost) -> Iterator[CheckResult]:
    holders = _device_holders(host)
    yield _check_devices(host)
    yield _check_holders(holders)
    yield _check_lock(host, holders)
    yield from _check_disks(host)
    yield _check_memory()
    yield _check_mounts(host)
    yield _check_credentials(host)
    yield from _check_containment(host)
    yield _versions()


def _check_devices(host: InspectedHost) -> CheckResult:
    if host.simulated:
        return _ok("devices", f"{host.chips} simulated chips")
    present = len(host.devices())
    if present >= host.chips:
        return _ok("devices", f"{present} chips")
    return CheckResult(
        check="devices",
        health=Health.FAILED,
        message=f"{present} of {host.chips} chips are present",
        impact="JAX cannot initialize every chip; jobs fail at start",
        remedy="replace the node with `tpu reapply`, or let the fleet release the slice",
    )


def _device_holders(host: InspectedHost) -> dict[int, str]:
    """Name of each process that has a chip open, by process id."""
    devices = {str(device) for device in host.devices()}
    holders = {}
    for process in psutil.process_iter():
        try:
            if _open_files(process.pid) & devices:
                holders[process.pid] = process.name()
        except (OSError, psutil.Error):
            continue  # exited meanwhile, or another user's
    return holders


def _open_files(pid: int) -> set[str]:
    """Files that a process has open. psutil omits devices."""
    names = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            names.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names


def _check_holders(holders: Mapping[int, str]) -> CheckResult:
    if not holders:
        return _ok("holders", "no process uses the chips")
    names = ", ".join(f"{name} ({pid})" for pid, name in holders.items())
    if all(_is_workload(pid) for pid in holders):
        return _ok("holders", f"the job uses the chips: {names}")
    return CheckResult(
        check="holders",
        health=Health.FAILED,
        message=f"other processes use the chips: {names}",
        impact="jobs fail with `The TPU is already in use`",
        remedy="end those processes if they are yours; --fix only ends what the fleet started",
    )


def _is_workload(pid: int) -> bool:
    try:
        return RUN_DIR_VARIABLE in psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return False


def _check_lock(host: InspectedHost, holders: Mapping[int, str]) -> CheckResult:
    file = host.root / LIBTPU_LOCKFILE
    if not file.exists():
        return _ok("lock", "no libtpu lock")
    if holders:
        return _ok("lock", "the libtpu lock belongs to a running process")
    if host.repair:
        file.unlink(missing_ok=True)
        return _ok("lock", "removed a stale libtpu lock", repaired=True)
    return CheckResult(
        check="lock",
        health=Health.FAILED,
        message=f"stale libtpu lock {file}; no process uses the chips",
        impact="programs of other users cannot open the chips",
        remedy="run again with --fix to remove it",
    )


def _check_disks(host: InspectedHost) -> Iterator[CheckResult]:
    paths = {"disk": host.environ.get("TPUFLEET_WORK") or "/", "tmp": str(host.root / "tmp")}
    for check, path in paths.items():
        if not Path(path).exists():
            continue
        usage = shutil.disk_usage(path)
        free = usage.free / usage.total
        message = f"{usage.free / 2**30:.1f} GiB ({free:.0%}) free at {path}"
        if free >= DISK_WARNING:
            yield _ok(check, message)
            continue
        yield CheckResult(
            check=check,
            health=Health.FAILED if free < DISK_FAILED else Health.WARNING,
            message=message,
            impact="writing checkpoints and logs will fail when the disk is full",
            remedy=f"delete old data at {path}",
        )


def _check_memory() -> CheckResult:
    memory = psutil.virtual_memory()
    message = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if memory.available / memory.total >= MEMORY_WARNING:
        return _ok("memory", message)
    return CheckResult(
        check="memory",
        health=Health.WARNING,
        message=message,
        impact="the kernel may kill the program",
    )


def _check_mounts(host: InspectedHost) -> CheckResult:
    disks = sorted((host.root / "mnt/disks").glob("*"))
    missing = [str(disk) for disk in disks if not os.path.ismount(disk)]
    if not disks:
        return _ok("mounts", "no data disks")
    if not missing:
        return _ok("mounts", f"data disks mounted: {len(disks)}")
    return CheckResult(
        check="mounts",
        health=Health.FAILED,
        message=f"not mounted: {', '.join(missing)}",
        impact="jobs do not find their data there",
        remedy="run the startup script again: `sudo google_metadata_script_runner startup`",
    )


def _check_credentials(host: InspectedHost) -> CheckResult:
    path = host.environ.get("TPUFLEET_TOKEN_FILE")
    file = Path(path) if path else None
    if file is None or not file.is_file():
        return _ok("credentials", "the agent holds its token in memory")
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & 0o077:
        return _ok("credentials", "only the agent can read its token")
    if host.repair:
        file.chmod(0o600)
        return _ok("credentials", f"set mode 600 on the agent's token {file}", repaired=True)
    return CheckResult(
        check="credentials",
        health=Health.FAILED,
        message=f"other users can read the agent's token {file} (mode {mode:o})",
        impact="any process on this host can impersonate it",
        remedy="run again with --fix to set mode 600",
    )


def _check_containment(host: InspectedHost) -> Iterator[CheckResult]:
    """Which guarantee holds for the processes of jobs. Nothing when no agent runs the checks."""
    message = host.environ.get(containment.IN_USE_VARIABLE, "")
    weak = message.startswith(f"{containment.Mechanism.MARKS}:") or "can read" in message
    if message and not weak:
        yield _ok("containment", message)
    elif message:
        yield CheckResult(
            check="containment",
            health=Health.WARNING,
            message=message,
            impact="only run jobs of people you trust on this host",
            remedy="allow user namespaces, or run the agent in a delegated control group",
        )


def _versions() -> CheckResult:
    versions = [f"Python {sys.version.split()[0]}", f"kernel {os.uname().release}"]
    for name in ("tpufleet", "jax", "jaxlib", "libtpu"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return _ok("versions", ", ".join(versions))


def _ok(check: str, message: str, *, repaired: bool = False) -> CheckResult:
    return CheckResult(check=check, health=Health.OK, message=message, repaired=repaired)


def main() -> None:
    host = InspectedHost(environ=os.environ, repair="--repair" in sys.argv[1:])
    report = DiagnosticReport(checks=tuple(run_checks(host)), at=datetime.now(UTC))
    sys.stdout.write(to_json(report).decode() + "\n")


if __name__ == "__main__":
    main()
