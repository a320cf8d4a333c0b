"""The doctor's look at one host: `python -m tpufleet.agent.diagnostics [--mend]`, findings as JSON."""

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

from tpufleet.model.encoding import to_json
from tpufleet.model.host_commands import CheckResult, DiagnosticReport, Health

LIBTPU_LOCKFILE = "tmp/libtpu_lockfile"
NEARLY_FULL, FULL = 0.10, 0.02  # of a disk that is free


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedHost:
    """What is looked at; a test gives another root."""

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
    holders = _holders(host)
    yield _devices(host)
    yield _who_holds(host, holders)
    yield _lock(host, holders)
    yield from _disks(host)
    yield _memory()
    yield _mounts(host)
    yield _credentials(host)
    yield _versions()


def _devices(host: InspectedHost) -> CheckResult:
    if host.simulated:
        return _good("devices", f"{host.chips} simulated chips")
    seen = len(host.devices())
    if seen >= host.chips:
        return _good("devices", f"{seen} chips")
    return CheckResult(
        check="devices",
        health=Health.FAILED,
        message=f"{seen} of {host.chips} chips are there",
        impact="JAX will not find every chip; jobs fail at their start",
        remedy="the node has to be replaced: `tpu reapply`, or let the fleet release the slice",
    )


def _holders(host: InspectedHost) -> dict[int, str]:
    """Processes with a chip open, by number."""
    devices = {str(device) for device in host.devices()}
    found = {}
    for process in psutil.process_iter():
        try:
            if _opened(process.pid) & devices:
                found[process.pid] = process.name()
        except (OSError, psutil.Error):
            continue  # ended while we looked, or not ours to look at
    return found


def _opened(pid: int) -> set[str]:
    """Files that a process has open. psutil leaves devices out."""
    names = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed while we looked
            names.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names


def _who_holds(host: InspectedHost, holders: Mapping[int, str]) -> CheckResult:
    if not holders:
        return _good("holders", "nobody holds the chips")
    ours = {pid for pid in holders if _is_of_the_fleet(pid)}
    named = ", ".join(f"{name} ({pid})" for pid, name in holders.items())
    if ours == set(holders):
        return _good("holders", f"the job holds the chips: {named}")
    return CheckResult(
        check="holders",
        health=Health.FAILED,
        message=f"somebody else holds the chips: {named}",
        impact="jobs end with `The TPU is already in use`",
        remedy="end those processes if they are yours; --fix never ends what it did not start",
    )


def _is_of_the_fleet(pid: int) -> bool:
    try:
        return "TPUFLEET_RUN_DIR" in psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return False


def _lock(host: InspectedHost, holders: Mapping[int, str]) -> CheckResult:
    file = host.root / LIBTPU_LOCKFILE
    if not file.exists():
        return _good("lock", "no libtpu lock")
    if holders:
        return _good("lock", "the libtpu lock belongs to a running program")
    if host.repair:
        file.unlink(missing_ok=True)
        return CheckResult(check="lock", health=Health.OK, repaired=True,
                       message="a stale libtpu lock was removed")  # fmt: skip
    return CheckResult(
        check="lock",
        health=Health.FAILED,
        message=f"a libtpu lock is left over ({file}), and nobody holds the chips",
        impact="programs of another user cannot open the chips",
        remedy="run with --fix to remove it",
    )


def _disks(host: InspectedHost) -> Iterator[CheckResult]:
    places = {"disk": host.environ.get("TPUFLEET_WORK") or "/", "tmp": str(host.root / "tmp")}
    for check, place in places.items():
        if not Path(place).exists():
            continue
        usage = shutil.disk_usage(place)
        free = usage.free / usage.total
        words = f"{usage.free / 2**30:.1f} GiB ({free:.0%}) free at {place}"
        health = (
            Health.FAILED if free < FULL else Health.WARNING if free < NEARLY_FULL else Health.OK
        )
        meaning = "" if health is Health.OK else "checkpoints and logs will soon fail"
        yield CheckResult(check=check, health=health, message=words, impact=meaning,
                      remedy="delete old data there" if meaning else "")  # fmt: skip


def _memory() -> CheckResult:
    memory = psutil.virtual_memory()
    free = memory.available / memory.total
    words = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if free >= 0.05:
        return _good("memory", words)
    return CheckResult(check="memory", health=Health.WARNING, message=words,
                   impact="the kernel may end the program")  # fmt: skip


def _mounts(host: InspectedHost) -> CheckResult:
    wanted = sorted((host.root / "mnt/disks").glob("*"))
    missing = [str(place) for place in wanted if not os.path.ismount(place)]
    if not wanted:
        return _good("mounts", "no data disks")
    if not missing:
        disks = "the data disk is" if len(wanted) == 1 else f"{len(wanted)} data disks are"
        return _good("mounts", f"{disks} mounted")
    return CheckResult(
        check="mounts",
        health=Health.FAILED,
        message=f"not mounted: {', '.join(missing)}",
        impact="data that jobs expect there is missing",
        remedy="run the startup script again: `sudo google_metadata_script_runner startup`",
    )


def _credentials(host: InspectedHost) -> CheckResult:
    named = host.environ.get("TPUFLEET_TOKEN_FILE")
    file = Path(named) if named else None
    if file is None or not file.is_file():
        return _good("credentials", "the agent holds its token")  # read before, at its start
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & 0o077:
        return _good("credentials", "the agent's token is private")
    if host.repair:
        file.chmod(0o600)
        return CheckResult(check="credentials", health=Health.OK, repaired=True,
                       message="others could read the agent's token; no more")  # fmt: skip
    return CheckResult(
        check="credentials",
        health=Health.FAILED,
        message=f"others can read the agent's token ({file})",
        impact="anybody on this host may speak for it",
        remedy="run with --fix",
    )


def _versions() -> CheckResult:
    found = [f"Python {sys.version.split()[0]}", f"kernel {os.uname().release}"]
    for name in ("tpufleet", "jax", "jaxlib", "libtpu"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return _good("versions", ", ".join(found))


def _good(check: str, words: str) -> CheckResult:
    return CheckResult(check=check, health=Health.OK, message=words)


def main() -> None:
    host = InspectedHost(environ=os.environ, repair="--mend" in sys.argv[1:])
    checkup = DiagnosticReport(checks=tuple(run_checks(host)), at=datetime.now(UTC))
    sys.stdout.write(to_json(checkup).decode() + "\n")


if __name__ == "__main__":
    main()
