"""The recipe of the container image: read as engines read it, built without one."""

from __future__ import annotations

import io
import json
import os
import tarfile

import pytest

from tpufleet.errors import BadInput
from tpufleet.testbed.kubernetes.image import builder, containerfile, oci
from tpufleet.testbed.kubernetes.image.chroot import ImageBuildError
from tpufleet.testbed.kubernetes.image.containerfile import Copy, Run

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


def test_a_recipe_is_read_with_its_arguments_filled_in():
    base, image = containerfile.parse(SMALL, {"KIND": "other"})
    assert base.steps == (
        Copy(("lists/other.txt",), "/build/"), Run("echo one && echo two"),
    )  # fmt: skip
    assert base.arguments == {"SOURCE_DATE_EPOCH": "1000", "KIND": "other"}
    assert (image.base, image.steps) == ("base", (Copy(("/opt",), "/opt", "base"),))
    assert image.environment == {"A": "1", "B": "two words"}
    assert (image.user, image.entrypoint) == ("7:7", ("tpu", "serve"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("HEALTHCHECK CMD true", "HEALTHCHECK is not known"),
        ("RUN true", "the last stage has a RUN"),
        ("COPY --chmod=755 a b", "is not understood"),
        ("ENTRYPOINT tpu", "is not understood"),
        ("FROM a b", "is not understood"),
    ],
)
def test_what_cannot_be_built_without_an_engine_is_refused_by_line(line, words):
    with pytest.raises(BadInput, match=words):
        containerfile.parse(f"{SMALL}{line}\n")


def test_our_own_recipe_runs_as_nobody_with_checked_packages_on_a_pinned_base():
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
    assert all("--require-hashes" in one or "--no-index" in one for one in installs)


def folder(place, files: dict[str, str]):
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def test_the_same_files_give_the_same_image_whenever_and_in_whatever_order_they_were_made(tmp_path):
    files = {"b/two": "2", "a": "1", "b/one": "1"}
    first = folder(tmp_path / "first", files)
    second = folder(tmp_path / "second", dict(reversed(files.items())))
    os.utime(second / "a", (5, 5))
    (first / "link").symlink_to("a")
    (second / "link").symlink_to("a")
    layers = [
        oci.write_layer(tmp_path / f"{number}.tar", oci.walk(one), mtime=1000)
        for number, one in enumerate((first, second))
    ]
    assert layers[0].digest == layers[1].digest
    built = [oci.Image(name="localhost/x", layers=(one,)) for one in layers]
    assert built[0].reference == built[1].reference
    (second / "a").write_text("3")
    changed = oci.write_layer(tmp_path / "3.tar", oci.walk(second), mtime=1000)
    assert changed.digest != layers[0].digest


def test_an_archive_holds_what_its_index_says(tmp_path):
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


def test_what_is_skipped_keeps_its_folder_and_loses_its_content(tmp_path):
    made = folder(tmp_path / "f", {"var/log/a": "1", "var/b": "2"})
    found = {name for _, name in oci.walk(made, "", frozenset({"var/log"}))}
    assert found == {".", "var", "var/log", "var/b"}


def test_a_package_that_was_installed_without_its_recipe_says_what_is_missing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(builder, "__file__", str(tmp_path / "a/b/c/d/e/builder.py"))
    with pytest.raises(ImageBuildError, match="from a checkout"):
        builder.source_checkout()
