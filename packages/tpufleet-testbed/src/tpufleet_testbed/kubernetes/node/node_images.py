"""Loads images into the containerd of a real node, which has no registry to pull from."""

from __future__ import annotations

import io
import os
import shutil
from typing import Any, BinaryIO

from tpufleet_testbed.kubernetes import programs
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.image import oci
from tpufleet_testbed.kubernetes.image.oci import Blob, Image
from tpufleet_testbed.kubernetes.node import node_config
from tpufleet_testbed.kubernetes.node.node_config import NodeLayout


def pause_image(plane: KubernetesControlPlane) -> Image:
    """The image of the sandbox container of each pod: a single binary."""
    layer = oci.write_layer(
        plane.layout.folder / "pause.tar", [(plane.build.binary("pause"), "pause")],
        mtime=0, owned_by_root=True,
    )  # fmt: skip
    settings = {"Entrypoint": ["/pause"], "User": "65535:65535"}
    return Image(name=node_config.PAUSE_IMAGE, layers=(layer,), settings=settings)


def load_image(node: NodeLayout, image: Image) -> str:
    """Returns the reference for pod manifests."""
    for layer in image.layers:
        _add_layer(node, layer)
    archive = io.BytesIO()
    image.write(archive, include_layers=False)
    _ctr(node, "images", "import", "-", stdin=archive.getvalue())
    return image.reference


def _add_layer(node: NodeLayout, layer: Blob) -> None:
    """Link the layer into containerd's content store and register it: milliseconds, where an import
    takes seconds."""
    store = node.folder / "containerd" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    store.mkdir(parents=True, exist_ok=True)
    target = store / layer.digest.removeprefix("sha256:")
    if not target.exists():
        try:
            os.link(layer.path, target)
        except OSError:  # on another file system
            shutil.copyfile(layer.path, target)
    expected = ("--expected-digest", layer.digest, "--expected-size", str(layer.size))
    with layer.path.open("rb") as content:
        _ctr(node, "content", "ingest", *expected, layer.digest, stdin=content)


def _ctr(node: NodeLayout, *args: str, stdin: bytes | BinaryIO = b"") -> None:
    source: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    argv = ["ctr", "--address", node.socket, "--namespace", "k8s.io", *args]
    programs.run(f"ctr {' '.join(args[:2])}", argv, **source)
