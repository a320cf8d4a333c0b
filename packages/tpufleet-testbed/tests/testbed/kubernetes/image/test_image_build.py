"""The Containerfile: parsed as container engines do, and built without one."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from pathlib import Path

import pytest

from tests.repository import ROOT
from tpufleet.errors import BadInput
from tpufleet_gke.environment.cloud_build import pipelines
from tpufleet_testbed.kubernetes.image import builder, containerfile, oci
from tpufleet_testbed.kubernetes.image.chroot import ImageBuildError
from tpufleet_testbed.kubernetes.image.containerfile import Copy, Run

SMALL = """
ARG KIND=plain
ARG SOURCE_DATE_EPOCH=1000
# A comment.
FROM debian:12-slim AS base
ARG SOURCE_DATE_EPOCH
ARG KIND
COPY lists/${KIND}.txt /build/
RUN echo one \\
    && echo two

FROM base
COPY --from=base /opt /opt
ENV A=1 B="two words"
USER 7:7
ENTRYPOINT ["tpu", "serve"]
"""


def test_arguments_are_expanded():
    base, image = containerfile.parse(SMALL, {"KIND": "other"})
    assert base.steps == (
        Copy(("lists/other.txt",), "/build/"), Run("echo one && echo two"),
    )  # fmt: skip
    assert base.arguments == {"SOURCE_DATE_EPOCH": "1000", "KIND": "other"}
    assert (image.base, image.steps) == ("base", (Copy(("/opt",), "/opt", "base"),))
    assert image.environment == {"A": "1", "B": "two words"}
    assert (image.user, image.entrypoint) == ("7:7", ("tpu", "serve"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("HEALTHCHECK CMD true", "HEALTHCHECK.*supported are"),
        ("RUN true", "the last stage consists of COPY"),
        ("COPY --chmod=755 a b", "cannot parse"),
        ("ENTRYPOINT tpu", "cannot parse"),
        ("FROM a b", "cannot parse"),
    ],
)
def test_unsupported_lines_are_rejected(line, message):
    with pytest.raises(BadInput, match=message):
        containerfile.parse(f"{SMALL}{line}\n")


def test_our_image_is_unprivileged_with_hashed_packages_on_a_pinned_base():
    text = (builder.source_checkout() / builder.CONTAINERFILE).read_text()
    *stages, image = containerfile.parse(text)
    assert image.user == "65532:65532" and image.entrypoint == ("tpu",)
    assert image.environment["PATH"].startswith("/opt/tpufleet/bin:")
    bases = {stage.base for stage in stages} - {stage.name for stage in stages}
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    installs = [
        step.command for stage in stages for step in stage.steps
        if isinstance(step, Run) and "pip install" in step.command
    ]  # fmt: skip
    assert len(installs) == 3
    assert all("--require-hashes" in command or "--no-index" in command for command in installs)


def folder(path, files: dict[str, str]):
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_images_are_reproducible(tmp_path):
    files = {"b/two": "2", "a": "1", "b/one": "1"}
    first = folder(tmp_path / "first", files)
    second = folder(tmp_path / "second", dict(reversed(files.items())))
    os.utime(second / "a", (5, 5))
    (first / "link").symlink_to("a")
    (second / "link").symlink_to("a")
    layers = [
        oci.write_layer(tmp_path / f"{number}.tar", oci.walk(source), mtime=1000)
        for number, source in enumerate((first, second))
    ]
    assert layers[0].digest == layers[1].digest
    built = [oci.Image(name="localhost/x", layers=(layer,)) for layer in layers]
    assert built[0].reference == built[1].reference
    (second / "a").write_text("3")
    changed = oci.write_layer(tmp_path / "3.tar", oci.walk(second), mtime=1000)
    assert changed.digest != layers[0].digest


def test_the_archive_matches_its_index(tmp_path):
    layer = oci.write_layer(
        tmp_path / "layer.tar", oci.walk(folder(tmp_path / "f", {"a": "1"}), "opt"), mtime=1
    )
    image = oci.Image(name="localhost/x", layers=(layer,), settings={"User": "7"})
    out = io.BytesIO()
    image.write(out)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        read = lambda name: archive.extractfile(name).read()
        blob = lambda digest: read("blobs/" + digest.replace(":", "/"))
        (top,) = json.loads(read("index.json"))["manifests"]
        assert top["annotations"]["io.containerd.image.name"] == image.reference
        manifest = json.loads(blob(top["digest"]))
        config = json.loads(blob(manifest["config"]["digest"]))
        assert config["config"]["User"] == "7"
        assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
        content = blob(manifest["layers"][0]["digest"])
        assert oci.digest_of(content) == layer.digest
    with tarfile.open(fileobj=io.BytesIO(content)) as inner:
        assert {entry.name: entry.mtime for entry in inner} == {"opt": 1, "opt/a": 1}


def test_skipped_folders_are_kept_without_their_content(tmp_path):
    source = folder(tmp_path / "f", {"var/log/a": "1", "var/b": "2"})
    names = {name for _, name in oci.walk(source, "", frozenset({"var/log"}))}
    assert names == {".", "var", "var/log", "var/b"}


def test_an_installed_package_cannot_build_the_image(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "__file__", str(tmp_path / "a/b/c/d/e/f/builder.py"))
    with pytest.raises(ImageBuildError, match="from a checkout"):
        builder.source_checkout()


def test_every_variant_has_pinned_packages_and_a_pipeline():
    folder = builder.source_checkout() / "requirements"
    pipeline = Path(pipelines.__file__).with_name("images.yaml").read_text()
    built = re.findall(r"REQUIREMENTS=(\S+)", pipeline)
    assert set(builder.VARIANTS.values()) == set(built)
    packages = {
        name: {line.partition("==")[0] for line in (folder / f"{file}.txt").read_text().splitlines()
               if "==" in line}
        for name, file in builder.VARIANTS.items()
    }  # fmt: skip
    assert "jax" not in packages["server"] and "jax" in packages["agent"]
    assert packages["server"] < packages["agent"] < packages["tpu"] < packages["trainer"]
    assert {"flax", "grain", "orbax-checkpoint"} <= packages["trainer"]


def test_our_image_is_built_on_a_base_that_a_digest_names():
    by_digest = "docker.io/library/debian@sha256:" + "0" * 64
    text = (ROOT / "deploy" / "docker" / "Containerfile").read_text()
    assert containerfile.parse(text, {"BASE": by_digest})[0].base == by_digest
