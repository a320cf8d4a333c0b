"""Earlier releases of Kubernetes, JobSet and Kueue for the local control plane, for the version
matrix of the tests. JobSet and Kueue are built in the source tree of their own release, whose
go.sum pins what it needs; Kubernetes from golang_earlier/, which has a go.sum of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tpufleet_testbed.kubernetes import binaries, go_sources
from tpufleet_testbed.kubernetes.binaries import Build, Progress

KUBERNETES, JOBSET, KUEUE = "k8s.io/kubernetes", "sigs.k8s.io/jobset", "sigs.k8s.io/kueue"
KUBERNETES_SOURCES = Path(__file__).parent / "golang_earlier"


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRelease:
    """A release that replaces the one of the same module in a build."""

    module: str
    version: str
    package: str  # of its main, in its own tree
    binary: str  # see go_sources.BUILD_STEPS, and Build.kubernetes
    checksum: str = ""  # of its source, as in go.sum

    @property
    def title(self) -> str:
        return f"{self.binary} {self.version}"


# Besides the current releases, which golang/go.mod names.
EARLIER_RELEASES = (
    # golang_earlier/go.mod pins the same version.
    EarlierRelease(module=KUBERNETES, version="v1.35.4", package=".", binary="kubernetes"),
    EarlierRelease(
        module=JOBSET,
        version="v0.11.1",
        package=".",
        binary="jobset",
        checksum="h1:WgLEBnXTeX+4MxfVkIbfm4jIVgjvIY6Jfaei2okxKNk=",
    ),
    EarlierRelease(
        module=KUEUE,
        version="v0.17.1",
        package="./cmd/kueue",
        binary="kueue",
        checksum="h1:r4cwg3ZFF75l7RjVbdCJgM+0RpU0MJGp7t3rLH8Zyh4=",
    ),
)


def ensure(release: EarlierRelease, progress: Progress = lambda message: None) -> Build:
    """The current control plane with this release in it; built now if it is not cached."""
    current, root = binaries.ensure(progress), binaries.cache_root()
    final = root / f"{go_sources.build_key()}-{release.binary}-{release.version}"
    with binaries.exclusive_lock(root / "lock", progress):
        if not final.is_dir():
            _build(binaries.find_go(), release, current, final, progress)
    return Build(folder=final)


def _build(
    go: str, release: EarlierRelease, current: Build, final: Path, progress: Progress
) -> None:
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=final.parent))
    try:
        (draft / "bin").mkdir()
        for path in (current.folder / "bin").iterdir():
            if path.name != release.binary:
                os.link(path, draft / "bin" / path.name)
        shutil.copytree(current.folder / "manifests", draft / "manifests")
        tree = _source_tree(go, release, draft)
        progress(f"building {release.title}")
        binary = str(draft / "bin" / release.binary)
        kubernetes = release.module == KUBERNETES
        version = release.version.removeprefix("v") if kubernetes else go_sources.KUBERNETES_VERSION
        flags = go_sources.link_flags(version)
        binaries.compile_packages(go, tree, (release.package,), binary, progress, flags)
        if not kubernetes:
            manifests = draft / "manifests" / release.module.replace("/", "_")
            shutil.rmtree(manifests)
            patterns = go_sources.MANIFESTS[release.module]
            binaries.copy_files(tree, release.module, patterns, manifests)
        shutil.rmtree(tree)
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _source_tree(go: str, release: EarlierRelease, draft: Path) -> Path:
    """A writable copy of the module, with the patches of the current build. That of Kubernetes does
    not build on its own: its parts are modules of their own."""
    tree = draft / "src"
    if release.module == KUBERNETES:
        shutil.copytree(KUBERNETES_SOURCES, tree)
        return tree
    module = f"{release.module}@{release.version}"
    # Its checksum is here instead of in the checksum database, which not every proxy passes on.
    downloaded = binaries.download_module(go, draft, module, GONOSUMDB=release.module)
    assert downloaded["Sum"] == release.checksum, f"{module} has the checksum {downloaded['Sum']}"
    shutil.copytree(downloaded["Dir"], tree, copy_function=shutil.copyfile)
    for folder, _, _ in os.walk(tree):
        os.chmod(folder, 0o755)
    for patched_module, file, _, line, replacement in go_sources.PATCHED_FILES:
        if patched_module == release.module:
            (tree / file).write_text(binaries.patched(tree / file, line, replacement))
    return tree
