"""Container images in the OCI image layout: layers from folders, one archive.

Reproducible: entries are sorted and carry neither timestamps nor user names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    digest: str
    size: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    name: str  # without a tag
    layers: tuple[Blob, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # Env, User, Entrypoint …
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> bytes:
        return _json(
            {
                "architecture": ARCHITECTURES[platform.machine()],
                "os": "linux",
                "config": {**self.settings, "Labels": dict(self.labels)},
                "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in self.layers]},
            }
        )

    @property
    def manifest(self) -> bytes:
        layers = [_descriptor("layer.v1.tar", layer.digest, layer.size) for layer in self.layers]
        return _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("config.v1+json", digest_of(self.config), len(self.config)),
                "layers": layers,
            }
        )

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def reference(self) -> str:
        """Name and tag; the tag is derived from the content."""
        return f"{self.name}:{self.digest.removeprefix('sha256:')[:12]}"

    def write(self, out: BinaryIO, *, include_layers: bool = True) -> None:
        """Write an archive for `ctr images import`; the layers may be loaded separately."""
        top = _descriptor("manifest.v1+json", self.digest, len(self.manifest))
        tag = self.reference.rpartition(":")[2]
        top["annotations"] = {
            "io.containerd.image.name": self.reference,
            "org.opencontainers.image.ref.name": tag,
        }
        with tarfile.open(fileobj=out, mode="w|") as archive:
            _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [top]}))
            for content in (self.manifest, self.config):
                _add(archive, _blob_path(digest_of(content)), content)
            for layer in {layer.digest: layer for layer in self.layers if include_layers}.values():
                entry = tarfile.TarInfo(_blob_path(layer.digest))
                entry.size = layer.size
                with layer.path.open("rb") as file:
                    archive.addfile(entry, file)


def write_layer(
    target: Path, entries: Iterable[tuple[Path, str]], *, mtime: int, owned_by_root: bool = False
) -> Blob:
    """Write a layer to `target` from (file, name in the layer) pairs."""
    draft = target.with_suffix(".draft")
    with (
        draft.open("wb") as out,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, name in sorted(entries, key=lambda entry: entry[1]):
            entry = archive.gettarinfo(str(path), arcname=name)
            if entry is None:  # a socket
                continue
            entry.mtime, entry.uname, entry.gname = mtime, "", ""
            if owned_by_root:
                entry.uid = entry.gid = 0
            if entry.isreg():
                with path.open("rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    draft.replace(target)
    return read_blob(target)


def walk(
    folder: Path, name: str = "", skipped: frozenset[str] = frozenset()
) -> Iterator[tuple[Path, str]]:
    """The folder and everything in it, under `name`, without the content of `skipped`."""
    yield folder, name or "."
    if name in skipped:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            inner = f"{name}/{entry.name}" if name else entry.name
            if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                yield from walk(Path(entry.path), inner, skipped)
            else:
                yield Path(entry.path), inner


def read_blob(path: Path) -> Blob:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Blob(digest=f"sha256:{digest}", size=path.stat().st_size, path=path)


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": size}


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
