"""Builds and uploads the bundle that TPU hosts install: a relocatable Python, the running tpufleet
with everything that its agent imports, and uv. Hosts unpack it and fetch nothing else."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tpufleet
from tpufleet.agent import own_wheel, uv_tool
from tpufleet.errors import BadInput, invalid

# Hosts run Ubuntu 22.04 (glibc 2.35) or later, on x86-64 so far:
# https://cloud.google.com/tpu/docs/runtimes
X86_64, AARCH64 = "x86_64", "aarch64"
DEFAULT_PYTHON = "3.12"
# Of the agent on hosts, besides those of tpufleet itself.
EXTRAS, TOOLS = "gcs", ("uv",)
FOLDER = "bundles"  # below the bucket
# Parts of a Python that neither an agent nor the environment of a job needs.
UNUSED = ("test", "idlelib", "turtledemo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    path: Path
    sha256: str
    python: str  # 3.12.8
    packages: dict[str, str]  # version by name

    @property
    def object_name(self) -> str:
        return f"{FOLDER}/tpufleet-{tpufleet.__version__}-{self.sha256[:12]}.tar.gz"


def build(
    target: Path,
    *,
    python_folder: Path | None = None,
    extras: str = EXTRAS,
    arm64: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """`python_folder`: a relocatable Python for the hosts, instead of downloading one with uv.
    `arm64`: with a second one, of which hosts keep the one for their CPUs."""
    with tempfile.TemporaryDirectory(prefix="tpufleet-bundle-") as name:
        work = Path(name)
        root = work / "root"
        wheel = own_wheel.build(work)
        requirement = f"tpufleet[{extras}] @ {wheel.as_uri()}"
        report(f"Python {DEFAULT_PYTHON if python_folder is None else f'from {python_folder}'}")
        source = python_folder or download_python(DEFAULT_PYTHON, work / "pythons")
        version, packages = _install(source, root / "python", requirement, X86_64, report)
        if arm64:
            other = download_python(version, work / AARCH64, AARCH64)
            _install(other, root / f"python-{AARCH64}", requirement, AARCH64, report)
        manifest = {"tpufleet": tpufleet.__version__, "python": version, "packages": packages}
        (root / "bundle.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        target.parent.mkdir(parents=True, exist_ok=True)
        report("packing")
        _pack(root, target)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Bundle(path=target, sha256=digest, python=version, packages=packages)


def upload(bundle: Bundle, bucket: str) -> str:
    """The URL. A bundle that is there already is the same: its name holds its checksum."""
    from tpufleet.runtime.gcs import Bucket

    Bucket(bucket).create(bundle.object_name, bundle.path)
    return f"{bucket.rstrip('/')}/{bundle.object_name}"


def _install(
    source: Path, target: Path, requirement: str, machine: str, report: Callable[[str], None]
) -> tuple[str, dict[str, str]]:
    """A copy of a Python, with the packages of the agent. Returns its version, and theirs."""
    site = _copy_python(source, target)
    version, platform = site.parent.name.removeprefix("python"), f"{machine}-manylinux_2_28"
    report(f"packages for Python {version} on {platform}")
    _run(
        [uv_tool.find_uv(), "pip", "install", "--no-progress", "--no-config",
         "--python", sys.executable, "--target", site, "--python-version", version,
         "--python-platform", platform, "--only-binary", ":all:", "--link-mode", "copy",
         requirement, *TOOLS],
        "cannot install the packages of the agent",
    )  # fmt: skip
    return version, _installed(site)


def download_python(version: str, folder: Path, machine: str = X86_64) -> Path:
    """A relocatable one for hosts."""
    uv = uv_tool.find_uv()
    platform = f"linux-{machine}-gnu"
    wanted = f"cpython-{version}-{platform}"
    _run(
        [uv, "python", "install", "--no-progress", "--no-config", "--no-bin",
         "--install-dir", folder, wanted],
        f"cannot download Python {version} for the hosts; "
        "pass a relocatable Python with --python-folder",
    )  # fmt: skip
    found = [path for path in folder.glob(f"cpython-{version}*") if not path.is_symlink()]
    if not found:
        raise BadInput(f"uv installed no Python {version} for {platform}")
    return found[0]


def _copy_python(source: Path, target: Path) -> Path:
    """Without what an agent does not need. Returns its folder of packages."""
    libraries = [path for path in source.glob("lib/python3.*") if (path / "os.py").is_file()]
    if not libraries or not (source / "bin" / "python3").exists():
        raise invalid(str(source), "a Python", "with bin/python3, lib/python3.12/os.py")
    library = libraries[0].relative_to(source)

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        drop = {name for name in names if name == "__pycache__" or name.endswith(".a")}
        if here == source:
            drop |= {name for name in names if name not in ("bin", "include", "lib")}
        elif here == source / library:
            drop |= {name for name in names if name in UNUSED or name.startswith("config-")}
            drop |= {"site-packages"} & set(names)
        elif here == source / "bin":
            drop |= {name for name in names if not name.startswith("python3")}
            drop |= {name for name in names if name.endswith("-config")}
        elif here == source / "lib":
            keep = (library.name, "libpython")
            drop |= {name for name in names if not name.startswith(keep)}
        return drop

    shutil.copytree(source, target, symlinks=True, ignore=ignored)
    site = target / library / "site-packages"
    site.mkdir()
    return site


def _installed(site: Path) -> dict[str, str]:
    """From the names of `*.dist-info`."""
    parts = (
        path.name.removesuffix(".dist-info").split("-", 1) for path in site.glob("*.dist-info")
    )
    return {name: version for name, version in sorted(parts)}


def _pack(root: Path, target: Path) -> None:
    """The same content gives the same bytes: sorted, without times and owners."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if "__pycache__" in Path(entry.name).parts:
            return None
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            draft.open("wb") as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0, compresslevel=6) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for path in sorted(root.rglob("*")):
                archive.add(path, path.relative_to(root), recursive=False, filter=plain)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _run(argv: Sequence[str | Path], failure: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        [str(part) for part in argv], env=kept, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()[-12:]
        raise BadInput("\n".join([failure, *(f"  {line}" for line in lines)]))
