"""Builds the binaries of a control plane once, into a cache that is keyed by their sources."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpufleet.errors import FleetError, Permanent
from tpufleet.testbed.kubernetes import go_sources

GIB = 2**30
# Measured: binaries 0.4 GB, Go's build cache 2.6 GB, modules 2 GB.
COLD_BUILD_SPACE = 6 * GIB
TOLD_EVERY = 50  # packages

Progress = Callable[[str], None]


class ControlPlaneBuildError(FleetError, Permanent):
    """There is no control plane on this machine, and it cannot be built as things are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """A folder with everything that a control plane is started from."""

    folder: Path

    @property
    def harness(self) -> Path:
        return self.folder / "bin" / "harness"

    def binary(self, name: str) -> Path:
        return self.folder / "bin" / name

    def manifests(self, module: str) -> list[Path]:
        """The manifest files of a module, in a stable order."""
        return sorted((self.folder / "manifests" / module.replace("/", "_")).rglob("*.yaml"))


def cache_root() -> Path:
    """Outside of any checkout, so that a fresh clone finds an earlier build."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TPUFLEET_CACHE") or Path(base) / "tpufleet") / "clusters"


def find_cached(root: Path | None = None) -> Build | None:
    folder = (root or cache_root()) / go_sources.build_key()
    return Build(folder=folder) if folder.is_dir() else None


def ensure(progress: Progress = lambda words: None, root: Path | None = None) -> Build:
    """The build, from the cache or made now. Two who ask at once wait for one build."""
    root = root or cache_root()
    found = find_cached(root)
    if found is not None:
        return found
    go = find_go()
    root.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(root / "lock", progress):
        return find_cached(root) or _build(go, root, progress)


def find_go() -> str:
    """A Go that is new enough, or words on how to get one."""
    wanted = ".".join(map(str, go_sources.MIN_GO_VERSION))
    cure = f"install Go {wanted} or newer (https://go.dev/dl/) and put it on PATH"
    go = shutil.which("go")
    if go is None:
        raise ControlPlaneBuildError(
            f"the local control plane is built with Go, which is not here; {cure}"
        )
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    match = re.match(r"go(\d+)\.(\d+)", said.stdout)
    if match is None or (int(match[1]), int(match[2])) < go_sources.MIN_GO_VERSION:
        raise ControlPlaneBuildError(f"{go} is {said.stdout.strip() or 'no working Go'}; {cure}")
    return go


def check_disk_space(folders: list[Path], needed: int = COLD_BUILD_SPACE) -> None:
    for folder in folders:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ControlPlaneBuildError(
                f"building needs {needed / GIB:.0f} GiB, and {folder} has {free / GIB:.1f} GiB "
                "free; make room, or set TPUFLEET_CACHE, GOCACHE and GOMODCACHE to larger disks"
            )


def _build(go: str, root: Path, progress: Progress) -> Build:
    caches = subprocess.run(
        [go, "env", "GOCACHE", "GOMODCACHE"], capture_output=True, text=True, check=True
    ).stdout.split()
    check_disk_space([root, *map(Path, caches)])
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
        work = draft / "src"
        shutil.copytree(go_sources.GO_SOURCES, work)
        (draft / "bin").mkdir()
        _copy_changed(go, work)
        for number, (words, packages, binaries) in enumerate(go_sources.BUILD_STEPS, start=1):
            told = f"[{number}/{len(go_sources.BUILD_STEPS)}] building {words}"
            progress(told)
            say = lambda more, told=told: progress(f"{told}: {more}")
            _compile(go, work, packages, _output(draft / "bin", binaries), say)
        for module, patterns in go_sources.MANIFESTS.items():
            _copy_manifests(go, work, module, patterns, draft / "manifests")
        shutil.rmtree(work)
        final = root / go_sources.build_key()
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    progress(f"built into {final}")
    return Build(folder=final)


def _copy_changed(go: str, work: Path) -> None:
    for module, file, package, line, instead in go_sources.PATCHED_FILES:
        text = (_module_folder(go, work, module) / file).read_text()
        if text.count(line) != 1:
            raise ControlPlaneBuildError(
                f"{module}: {file} is not the one we know; it lacks {line!r}"
            )
        (work / package).mkdir()
        (work / package / "main.go").write_text(text.replace(line, instead))


def _module_folder(go: str, work: Path, module: str) -> Path:
    """Downloads it where needed."""
    told = subprocess.run(
        [go, "mod", "download", "-json", module],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if told.returncode != 0:
        raise ControlPlaneBuildError(
            f"{module} cannot be downloaded: {told.stderr.strip() or told.stdout}"
        )
    return Path(json.loads(told.stdout)["Dir"])


def _compile(
    go: str,
    work: Path,
    packages: tuple[str, ...],
    out: str,
    progress: Progress,
) -> None:
    flags = ["-v", "-trimpath", "-ldflags", go_sources.link_flags()]
    argv = [go, "build", *flags, "-o", out, *packages]
    with subprocess.Popen(
        argv,
        cwd=work,
        env={**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        tail: list[str] = []
        for count, line in enumerate(running.stderr, start=1):
            tail = [*tail[-19:], line]
            if count % TOLD_EVERY == 0:
                progress(f"{count} packages")
    if running.returncode != 0:
        raise ControlPlaneBuildError(f"go build failed; its last words:\n{''.join(tail)}")


def _output(folder: Path, binaries: tuple[str, ...]) -> str:
    """One gets the name that we know it by; of several, Go names each by the folder it is in."""
    return str(folder / binaries[0]) if len(binaries) == 1 else f"{folder}{os.sep}"


def _copy_manifests(
    go: str, work: Path, module: str, patterns: tuple[str, ...], target: Path
) -> None:
    home = _module_folder(go, work, module)
    for pattern in patterns:
        found = sorted(home.glob(pattern))
        if not found:
            raise ControlPlaneBuildError(
                f"{module} has no {pattern}; its layout is not the one we know"
            )
        for path in found:
            copy = target / module.replace("/", "_") / path.relative_to(home)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())  # modules are read-only; the copy need not be


@contextmanager
def exclusive_lock(path: Path, progress: Progress) -> Iterator[None]:
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
