"""Packs the running tpufleet as one wheel, with the other distributions that are installed here:
hosts and jobs get exactly this code, however it was installed."""

from __future__ import annotations

import base64
import configparser
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import tpufleet
from tpufleet import host_packages, installed_packages
from tpufleet.model.values.encoding import to_json

# The testbed does not run on hosts.
PACKAGES = (
    "tpufleet", "tpufleet_activations", "tpufleet_firestore", "tpufleet_gke", "tpufleet_migration"
)  # fmt: skip
# A fixed time: the same code gives the same bytes.
TIMESTAMP = (2020, 1, 1, 0, 0, 0)
ENTRY_POINTS = "entry_points.txt"


def wheel_name() -> str:
    return f"tpufleet-{tpufleet.__version__}-py3-none-any.whl"


def build(folder: Path) -> Path:
    """Write the wheel into a folder that no job can change. One that is there already is not
    touched: caches go by its time."""
    target, packed = folder / wheel_name(), pack()
    if target.is_file() and target.read_bytes() == packed:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=folder, suffix=".new")
    with os.fdopen(descriptor, "wb") as file:
        file.write(packed)
    os.replace(draft, target)
    return target


def pack(*, for_jobs: bool = False) -> bytes:
    """The content of the wheel. That for jobs says where its requirements are on this host."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(_content(for_jobs).items()):
            info = zipfile.ZipInfo(name, TIMESTAMP)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def _content(for_jobs: bool) -> dict[str, bytes]:
    info = f"tpufleet-{tpufleet.__version__}.dist-info"
    content = {f"tpufleet/{host_packages.FILE}": _requirements()} if for_jobs else {}
    entry_points = ""
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            continue
        folder = Path(found.origin).parent
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                content[f"{package}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        try:
            installed = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # this process runs from such a wheel: the first distribution has them
        entry_points += installed.read_text(ENTRY_POINTS) or ""
    content[f"{info}/METADATA"] = _metadata().encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tpufleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    content[f"{info}/{ENTRY_POINTS}"] = _merged(entry_points).encode()
    record = [f"{name},{_digest(data)},{len(data)}" for name, data in sorted(content.items())]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    return content


def _requirements() -> bytes:
    packages = installed_packages.requirements_of("tpufleet")
    return to_json(
        {
            "python": sys.version_info[:2],
            "folders": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
            "modules": installed_packages.modules(packages),
        }
    )


def _merged(entry_points: str) -> str:
    """Each group once, with the entry points of all distributions."""
    groups = configparser.ConfigParser(strict=False, delimiters=("=",))
    groups.read_string(entry_points)
    merged = io.StringIO()
    groups.write(merged)
    return merged.getvalue()


def _metadata() -> str:
    """Of the installed distribution, with the version of the code that runs."""
    installed = importlib.metadata.metadata("tpufleet")
    lines = [
        f"Metadata-Version: {installed['Metadata-Version']}",
        "Name: tpufleet",
        f"Version: {tpufleet.__version__}",
        f"Requires-Python: {installed['Requires-Python']}",
    ]
    for key in ("Provides-Extra", "Requires-Dist"):
        lines += [f"{key}: {value}" for value in installed.get_all(key) or ()]
    return "\n".join(lines) + "\n"


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"
