"""Gives a real node its images: nothing can be pulled where there is no registry."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, BinaryIO

from tpufleet.errors import FleetError
from tpufleet.testbed.kubernetes.image import oci
from tpufleet.testbed.kubernetes.image.oci import Blob, Image
from tpufleet.testbed.kubernetes.node import node_config
from tpufleet.testbed.kubernetes.node.node_config import NodeLayout

if TYPE_CHECKING:
    from tpufleet.testbed.kubernetes.control_plane import ControlPlane


def pause_image(plane: ControlPlane) -> Image:
    """What holds the namespaces of each pod: one program and nothing else."""
    layer = oci.write_layer(
        plane.layout.folder / "pause.tar", [(plane.build.binary("pause"), "pause")],
        mtime=0, owned_by_root=True,
    )  # fmt: skip
    settings = {"Entrypoint": ["/pause"], "User": "65535:65535"}
    return Image(name=node_config.PAUSE_IMAGE, layers=(layer,), settings=settings)


def load_image(node: NodeLayout, image: Image) -> str:
    """Its name for pods."""
    for layer in image.layers:
        _lay_down(node, layer)
    archive = io.BytesIO()
    image.write(archive, include_layers=False)
    _ctr(node, "images", "import", "-", given=archive.getvalue())
    return image.reference


def _lay_down(node: NodeLayout, layer: Blob) -> None:
    """Put a layer where containerd keeps its content, and tell it. To hand it over would take as
    many seconds as this takes milliseconds."""
    kept = node.folder / "containerd" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    kept.mkdir(parents=True, exist_ok=True)
    place = kept / layer.digest.removeprefix("sha256:")
    if not place.exists():
        try:
            os.link(layer.path, place)
        except OSError:  # another disk
            shutil.copyfile(layer.path, place)
    known = ("--expected-digest", layer.digest, "--expected-size", str(layer.size))
    with layer.path.open("rb") as content:
        _ctr(node, "content", "ingest", *known, layer.digest, given=content)


def _ctr(node: NodeLayout, *args: str, given: bytes | BinaryIO = b"") -> None:
    source = {"input": given} if isinstance(given, bytes) else {"stdin": given}
    done = subprocess.run(
        ["ctr", "--address", str(node.socket), "--namespace", "k8s.io", *args],
        capture_output=True, check=False, **source,
    )  # fmt: skip
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip()
        raise FleetError(f"ctr {' '.join(args[:2])} failed: {told}")
