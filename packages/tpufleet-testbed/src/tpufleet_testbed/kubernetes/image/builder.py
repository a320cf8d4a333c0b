"""Builds the container image from the Containerfile, without a container engine.

A stage is a folder in which commands run (chroot); the last stage only copies, and each COPY is a
layer. Stages and layers are cached by a key of all their inputs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pathspec

from tpufleet_testbed.kubernetes import binaries, programs
from tpufleet_testbed.kubernetes.binaries import Progress
from tpufleet_testbed.kubernetes.image import chroot, containerfile, oci
from tpufleet_testbed.kubernetes.image.chroot import ImageBuildError
from tpufleet_testbed.kubernetes.image.containerfile import BuildStage, Copy, Run
from tpufleet_testbed.kubernetes.image.oci import Blob, Image

CONTAINERFILE = Path("deploy") / "docker" / "Containerfile"
NAME = "localhost/tpufleet"
# What an image is for → its packages, in requirements/.
VARIANTS = {
    "agent": "image",  # JAX without libtpu, for simulated chips
    "server": "image-server",  # no JAX
    "tpu": "image-tpu",  # with libtpu: server, agent and jobs
    "trainer": "image-trainer",  # and what the training examples import
}
CPU_ONLY = {"REQUIREMENTS": VARIANTS["agent"]}
EPOCH = "SOURCE_DATE_EPOCH"
CACHE_RETENTION_SECONDS = 14 * 24 * 3600.0  # since last use
# Differs from build to build, or does not belong in an image.
SKIPPED = frozenset(
    {"build", "dev", "proc", "run", "sys", "tmp", "var/cache/ldconfig", "var/lib/apt", "var/log"}
)


def cache_root() -> Path:
    return binaries.cache_root().with_name("images")


def source_checkout() -> Path:
    """The checkout that this module was imported from."""
    folder = Path(__file__).resolve().parents[6]
    if not (folder / CONTAINERFILE).is_file():
        raise ImageBuildError(
            f"{CONTAINERFILE} not found in {folder}; build the image from a checkout of tpufleet"
        )
    return folder


def build(
    context: Path | None = None,
    *,
    arguments: Mapping[str, str] = CPU_ONLY,
    progress: Progress = lambda message: None,
) -> Image:
    """The image of a checkout; unchanged stages and layers come from the cache."""
    context = context or source_checkout()
    text = (context / CONTAINERFILE).read_text()
    builder = _Builder(context, containerfile.parse(text, arguments), cache_root(), progress)
    builder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with binaries.exclusive_lock(builder.root / "lock", progress):
        return builder.image()


class _Builder:
    def __init__(
        self, context: Path, stages: list[BuildStage], root: Path, progress: Progress
    ) -> None:
        self.root = root
        self._context, self._progress = context, progress
        self._stages = {stage.name: stage for stage in stages}
        self._last = stages[-1]
        ignored = (context / CONTAINERFILE).with_name(f"{CONTAINERFILE.name}.dockerignore")
        self._ignored = pathspec.GitIgnoreSpec.from_lines(ignored.read_text().splitlines())
        epochs = {stage.arguments[EPOCH] for stage in stages if EPOCH in stage.arguments}
        if len(epochs) != 1:
            raise ImageBuildError(
                f"the Containerfile must set exactly one {EPOCH}, not {len(epochs)}"
            )
        self._mtime = int(epochs.pop())

    def image(self) -> Image:
        last = self._last
        layers = [self._base_layer(last.base)]
        layers += [self._copied_layer(step) for step in last.steps if isinstance(step, Copy)]
        self._prune()
        return Image(
            name=NAME,
            layers=tuple(layers),
            labels=last.labels,
            settings={
                "Env": [f"{key}={value}" for key, value in last.environment.items()],
                "User": last.user, "WorkingDir": last.workdir, "Entrypoint": list(last.entrypoint),
            },
        )  # fmt: skip

    # Layers

    def _base_layer(self, name: str) -> Blob:
        entries = lambda: oci.walk(self._folder(name), "", SKIPPED)
        return self._layer(f"base {self._key(name)}", entries)

    def _copied_layer(self, step: Copy) -> Blob:
        def entries() -> Iterator[tuple[Path, str]]:
            stage = self._folder(step.stage)
            for source in step.sources:
                yield from oci.walk(stage / source.lstrip("/"), step.target.strip("/"))

        return self._layer(f"copy {self._key(step.stage)} {step}", entries)

    def _layer(self, inputs: str, entries: Callable[[], Iterator[tuple[Path, str]]]) -> Blob:
        target = self.root / f"layer-{_hash(inputs)}.tar"
        if target.exists():
            os.utime(target)
            return oci.read_blob(target)
        return oci.write_layer(target, entries(), mtime=self._mtime)

    # Stages

    def _folder(self, name: str) -> Path:
        """The root file system of a stage; built if not cached."""
        folder = self.root / f"stage-{self._key(name)}"
        if not folder.exists():
            draft = folder.with_name(f".{folder.name}")
            shutil.rmtree(draft, ignore_errors=True)
            try:
                self._build_stage(name, draft)
                draft.rename(folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        os.utime(folder)
        return folder

    def _build_stage(self, name: str, root: Path) -> None:
        chroot.check_requirements()
        stage = self._stages.get(name)
        if stage is None:
            self._progress(f"{name}: bootstrapping from Debian packages")
            chroot.bootstrap_debian(name, root, self._mtime)
            return
        _copy_tree(self._folder(stage.base), root)
        for number, step in enumerate(stage.steps, start=1):
            title = step.command if isinstance(step, Run) else f"COPY to {step.target}"
            self._progress(f"{name} {number}/{len(stage.steps)}: {title[:70]}")
            if isinstance(step, Run):
                chroot.run_in_chroot(root, step.command, {**stage.environment, **stage.arguments})
            else:
                self._copy(step, root)

    def _copy(self, step: Copy, root: Path) -> None:
        target = root / step.target.lstrip("/")
        for source in step.sources:
            into_folder = step.target.endswith("/") or len(step.sources) > 1
            for path in self._files(source):
                inner = path.relative_to(self._context / source)
                destination = target / (
                    Path(source).name if into_folder and inner == Path() else inner
                )
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, destination)
                destination.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
                os.utime(destination, (self._mtime, self._mtime))

    def _files(self, source: str) -> list[Path]:
        top = self._context / source
        if not top.exists():
            raise ImageBuildError(f"COPY {source}: {top} does not exist")
        paths = [top] if top.is_file() else sorted(top.rglob("*"))
        return [
            path for path in paths
            if path.is_file() and not self._ignored.match_file(path.relative_to(self._context))
        ]  # fmt: skip

    # Keys

    def _key(self, name: str) -> str:
        """Digest of all inputs of a stage."""
        stage = self._stages.get(name)
        if stage is None:
            return _hash(f"{name} {platform.machine()} {self._mtime}")
        inputs = [self._key(stage.base), repr(sorted(stage.arguments.items()))]
        for step in stage.steps:
            inputs.append(repr(step))
            if isinstance(step, Copy) and not step.stage:
                for path in (path for source in step.sources for path in self._files(source)):
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                    inputs.append(f"{path.relative_to(self._context)} {content}")
        return _hash("\n".join(inputs))

    def _prune(self) -> None:
        """Drop stages that are only needed as layers, and entries that were not used for long."""
        bases = {stage.base for stage in self._stages.values()}
        for name in self._stages.keys() - bases - {self._last.name}:
            folder = self.root / f"stage-{self._key(name)}"
            if folder.exists():
                shutil.rmtree(folder)
        for path in self.root.glob("*-*"):
            if time.time() - path.stat().st_mtime > CACHE_RETENTION_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _copy_tree(source: Path, target: Path) -> None:
    argv = ["cp", "--archive", "--reflink=auto", source, target]
    programs.run(f"copying {source}", argv, ImageBuildError)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
