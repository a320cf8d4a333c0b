"""Builds the control plane binaries once, into a cache keyed by their sources."""

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
from tpufleet_testbed.kubernetes import go_sources, programs

GIB = 2**30
# Measured: binaries 0.4 GB, Go's build cache 2.6 GB, modules 2 GB.
COLD_BUILD_SPACE = 6 * GIB
PROGRESS_EVERY = 50  # packages

Progress = Callable[[str], None]


class ControlPlaneBuildError(FleetError, Permanent):
    """The control plane binaries are not cached and cannot be built on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """A folder with the binaries and manifests of a control plane."""

    folder: Path

    @property
    def harness(self) -> Path:
        return self.folder / "bin" / "harness"

    @property
    def kubernetes(self) -> Path:
        """Has the API server, the controller manager and the scheduler."""
        earlier = self.folder / "bin" / "kubernetes"
        return earlier if earlier.exists() else self.harness

    def binary(self, name: str) -> Path:
        return self.folder / "bin" / name

    def manifests(self, module: str) -> list[Path]:
        """The manifest files of a module, in a stable order."""
        return sorted((self.folder / "manifests" / module.replace("/", "_")).rglob("*.yaml"))


def cache_root() -> Path:
    """Outside any checkout, so that a fresh clone reuses an earlier build."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TPUFLEET_CACHE") or Path(base) / "tpufleet") / "clusters"


def find_cached(root: Path | None = None) -> Build | None:
    folder = (root or cache_root()) / go_sources.build_key()
    return Build(folder=folder) if folder.is_dir() else None


def ensure(progress: Progress = lambda message: None, root: Path | None = None) -> Build:
    """Return the cached build, or build now. Concurrent callers share one build."""
    root = root or cache_root()
    cached = find_cached(root)
    if cached is not None:
        return cached
    go = find_go()
    root.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(root / "lock", progress):
        return find_cached(root) or _build(go, root, progress)


def find_go() -> str:
    """Path of a Go toolchain that is new enough."""
    required = ".".join(map(str, go_sources.MIN_GO_VERSION))
    hint = f"install Go {required} or newer (https://go.dev/dl/) and add it to PATH"
    go = shutil.which("go")
    if go is None:
        raise ControlPlaneBuildError(
            f"building the local control plane requires Go, not found on PATH; {hint}"
        )
    result = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    match = re.match(r"go(\d+)\.(\d+)", result.stdout)
    if match is None or (int(match[1]), int(match[2])) < go_sources.MIN_GO_VERSION:
        version = result.stdout.strip() or "not a working Go toolchain"
        raise ControlPlaneBuildError(f"{go} is {version}; {hint}")
    return go


def check_disk_space(folders: list[Path], needed: int = COLD_BUILD_SPACE) -> None:
    for folder in folders:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ControlPlaneBuildError(
                f"{folder} has {free / GIB:.1f} GiB free, but the build needs {needed / GIB:.0f}; "
                "free disk space, or set TPUFLEET_CACHE, GOCACHE and GOMODCACHE to a larger disk"
            )


def _build(go: str, root: Path, progress: Progress) -> Build:
    caches = programs.run("go env", [go, "env", "GOCACHE", "GOMODCACHE"]).split()
    check_disk_space([root, *map(Path, caches)])
    final = root / go_sources.build_key()  # before the build: the checkout may change meanwhile
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
        work = draft / "src"
        shutil.copytree(go_sources.GO_SOURCES, work)
        (draft / "bin").mkdir()
        _write_patched(go, work)
        for number, (title, packages, binaries) in enumerate(go_sources.BUILD_STEPS, start=1):
            step = f"[{number}/{len(go_sources.BUILD_STEPS)}] building {title}"
            progress(step)
            compile_packages(
                go, work, packages, _output(draft / "bin", binaries), _prefixed(progress, step)
            )
        for module, patterns in go_sources.MANIFESTS.items():
            target = draft / "manifests" / module.replace("/", "_")
            copy_files(module_folder(go, work, module), module, patterns, target)
        shutil.rmtree(work)
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    progress(f"built into {final}")
    return Build(folder=final)


def _prefixed(progress: Progress, step: str) -> Progress:
    return lambda detail: progress(f"{step}: {detail}")


def _write_patched(go: str, work: Path) -> None:
    for module, file, package, line, replacement in go_sources.PATCHED_FILES:
        source = module_folder(go, work, module) / file
        (work / package).mkdir()
        (work / package / "main.go").write_text(patched(source, line, replacement))


def patched(file: Path, line: str, replacement: str) -> str:
    text = file.read_text()
    if text.count(line) != 1:
        raise ControlPlaneBuildError(f"cannot patch {file}: expected exactly one {line!r}")
    return text.replace(line, replacement)


def module_folder(go: str, work: Path, module: str) -> Path:
    return Path(download_module(go, work, module)["Dir"])


def download_module(go: str, work: Path, module: str, **variables: str) -> dict[str, str]:
    """What Go knows about the module, which is then in the module cache."""
    argv = [go, "mod", "download", "-json", module]
    environ = {**os.environ, **variables}
    output = programs.run(
        f"go mod download {module}", argv, ControlPlaneBuildError, cwd=work, env=environ
    )
    downloaded: dict[str, str] = json.loads(output)
    return downloaded


def compile_packages(
    go: str,
    work: Path,
    packages: tuple[str, ...],
    out: str,
    progress: Progress,
    link_flags: str = "",
) -> None:
    flags = ["-v", "-trimpath", "-ldflags", link_flags or go_sources.link_flags()]
    argv = [go, "build", *flags, "-o", out, *packages]
    with subprocess.Popen(
        argv,
        cwd=work,
        env={**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as compiler:
        assert compiler.stderr is not None
        tail: list[str] = []
        for count, line in enumerate(compiler.stderr, start=1):
            tail = [*tail[-19:], line]
            if count % PROGRESS_EVERY == 0:
                progress(f"{count} packages")
    if compiler.returncode != 0:
        raise ControlPlaneBuildError(f"go build failed:\n{''.join(tail)}")


def _output(folder: Path, binaries: tuple[str, ...]) -> str:
    """Output argument of `go build`: a file for one binary, else a folder where Go names them."""
    return str(folder / binaries[0]) if len(binaries) == 1 else f"{folder}{os.sep}"


def copy_files(home: Path, module: str, patterns: tuple[str, ...], target: Path) -> None:
    """The files of a module's tree that match, with their paths in it."""
    for pattern in patterns:
        paths = sorted(home.glob(pattern))
        if not paths:
            raise ControlPlaneBuildError(f"no file matches {pattern} in module {module}")
        for path in paths:
            copy = target / path.relative_to(home)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())  # not a copy of the read-only mode


@contextmanager
def exclusive_lock(path: Path, progress: Progress) -> Iterator[None]:
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for a build in another process")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
