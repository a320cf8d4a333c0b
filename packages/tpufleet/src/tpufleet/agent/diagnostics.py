"""Diagnoses one host: `python -m tpufleet.agent.diagnostics [--repair]` prints a JSON report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from tpufleet.agent.workload import containment
from tpufleet.agent.workload.environment_variables import RUN_DIR_VARIABLE
from tpufleet.model.fleet.host_commands import CheckResult, DiagnosticReport
from tpufleet.model.values.encoding import to_json

AS_ROOT = f"sudo {sys.executable} -m tpufleet.agent.diagnostics"
REPAIR = "run again with --fix"
LIBTPU_LOCKFILE = "tmp/libtpu_lockfile"
# Fractions of a disk, and of the memory, that are free.
DISK_WARNING, DISK_FAILED = 0.10, 0.02
MEMORY_WARNING = 0.05


class InspectedHost(msgspec.Struct, frozen=True, kw_only=True):
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


class ChipUse(msgspec.Struct, frozen=True, kw_only=True):
    holders: Mapping[int, str]  # name of each process that has a chip open, by process id
    unseen: int  # processes of other users, whose open files this user may not list


def run_checks(host: InspectedHost, use: ChipUse | None = None) -> Iterator[CheckResult]:
    use = use or chip_use(host)
    yield _check_devices(host)
    yield _check_holders(use)
    yield _check_lock(host, use)
    yield from _check_disks(host)
    yield _check_memory()
    yield _check_mounts(host)
    yield _check_credentials(host)
    yield from _check_containment(host)
    yield _versions()


def _check_devices(host: InspectedHost) -> CheckResult:
    if host.simulated:
        return CheckResult.ok("devices", f"{host.chips} simulated chips")
    present = len(host.devices())
    if present >= host.chips:
        return CheckResult.ok("devices", f"{present} chips")
    return CheckResult.failed(
        "devices",
        f"{present} of {host.chips} chips are present",
        "JAX cannot initialize every chip; jobs fail at start",
        "replace the TPU VM with `tpu vm apply --replace`, or let the fleet release the slice",
    )


def chip_use(host: InspectedHost) -> ChipUse:
    devices = {str(device) for device in host.devices()}
    holders, unseen = {}, 0
    for process in psutil.process_iter():
        try:
            if _open_files(process.pid) & devices:
                holders[process.pid] = process.name()
        except PermissionError:
            unseen += not _is_kernel_thread(process)
        except (OSError, psutil.Error):
            continue  # exited meanwhile
    return ChipUse(holders=holders, unseen=unseen)


def _is_kernel_thread(process: psutil.Process) -> bool:
    """Kernel threads have no command line, and hold no chip."""
    try:
        return not process.cmdline()
    except (psutil.Error, OSError):
        return True


def _open_files(pid: int) -> set[str]:
    """Files that a process has open. psutil omits devices."""
    names = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            names.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names


def _check_holders(use: ChipUse) -> CheckResult:
    holders = use.holders
    if not holders:
        if not use.unseen:
            return CheckResult.ok("holders", "no process uses the chips")
        message = (
            f"no process of user {_user_name()} uses the chips; "
            f"{use.unseen} processes of other users cannot be inspected"
        )
        return CheckResult.ok("holders", message, remedy=f"to see all, run on the host: {AS_ROOT}")
    names = ", ".join(f"{name} ({pid})" for pid, name in holders.items())
    if all(_is_workload(pid) for pid in holders):
        return CheckResult.ok("holders", f"the job uses the chips: {names}")
    return CheckResult.failed(
        "holders",
        f"other processes use the chips: {names}",
        "jobs fail with `The TPU is already in use`",
        "end those processes if they are yours; --fix only ends what the fleet started",
    )


def _is_workload(pid: int) -> bool:
    try:
        return RUN_DIR_VARIABLE in psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return False


def _check_lock(host: InspectedHost, use: ChipUse) -> CheckResult:
    file = host.root / LIBTPU_LOCKFILE
    if not file.exists():
        return CheckResult.ok("lock", "no libtpu lock")
    if pid := next(iter(use.holders), None) or _lock_holder(file):
        return CheckResult.ok("lock", f"process {pid} holds the libtpu lock")
    if use.unseen:
        return CheckResult.warning(
            "lock",
            f"libtpu lock {file}; it may belong to one of {use.unseen} processes of other users",
            "if no process uses the chips, programs of other users cannot open them",
            f"to check and remove it, run on the host: {AS_ROOT} --repair",
        )
    return _repairable(
        host,
        "lock",
        f"stale libtpu lock {file}",
        "programs of other users cannot open the chips",
        lambda: file.unlink(missing_ok=True),
        f"sudo rm {file}",
    )


def _repairable(
    host: InspectedHost,
    check: str,
    problem: str,
    impact: str,
    repair: Callable[[], None],
    command: str,
) -> CheckResult:
    """`command` does what `repair` does, for a user with more rights."""
    if not host.repair:
        return CheckResult.failed(check, problem, impact, REPAIR)
    try:
        repair()
    except OSError as error:
        return CheckResult.failed(
            check, f"{problem}; not repaired: {error.strerror}", impact, f"run `{command}`"
        )
    return CheckResult.ok(check, f"repaired: {problem}", repaired=True)


def _lock_holder(file: Path) -> int | None:
    """The process that has locked the file. Every user may read the kernel's list of locks."""
    status = file.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    # `1: FLOCK  ADVISORY  WRITE 708 00:13:1242 0 EOF`
    fields = [line.split() for line in lines if "->" not in line]
    return next((int(parts[4]) for parts in fields if parts[5] == device), None)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _check_disks(host: InspectedHost) -> Iterator[CheckResult]:
    paths = {"disk": host.environ.get("TPUFLEET_WORK") or "/", "tmp": str(host.root / "tmp")}
    for check, path in paths.items():
        if not Path(path).exists():
            continue
        usage = shutil.disk_usage(path)
        free = usage.free / usage.total
        message = f"{usage.free / 2**30:.1f} GiB ({free:.0%}) free at {path}"
        if free >= DISK_WARNING:
            yield CheckResult.ok(check, message)
            continue
        report = CheckResult.failed if free < DISK_FAILED else CheckResult.warning
        impact = "writing checkpoints and logs will fail when the disk is full"
        yield report(check, message, impact, f"delete old data at {path}")


def _check_memory() -> CheckResult:
    memory = psutil.virtual_memory()
    message = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if memory.available / memory.total >= MEMORY_WARNING:
        return CheckResult.ok("memory", message)
    return CheckResult.warning("memory", message, "the kernel may kill the program")


def _check_mounts(host: InspectedHost) -> CheckResult:
    disks = sorted((host.root / "mnt/disks").glob("*"))
    missing = [str(disk) for disk in disks if not os.path.ismount(disk)]
    if not missing:
        return CheckResult.ok("mounts", f"data disks mounted: {len(disks)}")
    return CheckResult.failed(
        "mounts",
        f"not mounted: {', '.join(missing)}",
        "jobs do not find their data there",
        "run the startup script again: `sudo google_metadata_script_runner startup`",
    )


def _check_credentials(host: InspectedHost) -> CheckResult:
    path = host.environ.get("TPUFLEET_TOKEN_FILE")
    file = Path(path) if path else None
    mode = stat.S_IMODE(file.stat().st_mode) if file is not None and file.is_file() else 0
    if file is None or not mode & 0o077:
        return CheckResult.ok("credentials", "only the agent can read its token")
    return _repairable(
        host,
        "credentials",
        f"other users can read the agent's token {file} (mode {mode:o})",
        "any process on this host can impersonate it",
        lambda: file.chmod(0o600),
        f"sudo chmod 600 {file}",
    )


def _check_containment(host: InspectedHost) -> Iterator[CheckResult]:
    """Which guarantee holds for the processes of jobs. Nothing when no agent runs the checks."""
    message = host.environ.get(containment.IN_USE_VARIABLE, "")
    if message and not host.environ.get(containment.WEAK_VARIABLE):
        yield CheckResult.ok("containment", message)
    elif message:
        yield CheckResult.warning(
            "containment",
            message,
            "only run jobs of people you trust on this host",
            "allow user namespaces, or run the agent in a delegated control group",
        )


def _versions() -> CheckResult:
    versions = [f"Python {sys.version.split()[0]}", f"kernel {os.uname().release}"]
    for name in ("tpufleet", "jax", "jaxlib", "libtpu"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return CheckResult.ok("versions", ", ".join(versions))


def main() -> None:
    host = InspectedHost(environ=os.environ, repair="--repair" in sys.argv[1:])
    report = DiagnosticReport(checks=tuple(run_checks(host)), at=datetime.now(UTC))
    sys.stdout.write(to_json(report).decode() + "\n")


if __name__ == "__main__":
    main()
