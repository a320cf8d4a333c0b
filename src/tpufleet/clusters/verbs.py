"""What `tpu cluster local` does with a control plane in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tpufleet.clusters import control_planes
from tpufleet.clusters.control_planes import PartStatus


def up(folder: Path, progress: Callable[[str], None]) -> Path:
    return control_planes.up(folder, progress).kubeconfig


def down(folder: Path) -> bool:
    return control_planes.down(folder)


def status(folder: Path) -> Sequence[PartStatus]:
    return control_planes.status(folder)
