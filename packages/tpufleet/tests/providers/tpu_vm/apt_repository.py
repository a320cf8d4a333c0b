"""A signed repository of Debian packages in a folder, as Google has one for gcsfuse."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from email.utils import formatdate
from pathlib import Path

import pytest

CONTROL = """Package: {name}
Version: 1.0
Architecture: amd64
Maintainer: nobody <nobody@example.com>
Description: a program that prints its name
"""


def build(folder: Path, name: str, suite: str) -> None:
    """With one package, a program of this name; the key of its signature is doc/apt-key.gpg."""
    for program in ("gpg", "gpg-agent", "dpkg-deb"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    package = folder / "package"
    program = package / "usr/bin" / name
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {name}\n")
    program.chmod(0o755)
    (package / "DEBIAN").mkdir(mode=0o755)
    (package / "DEBIAN/control").write_text(CONTROL.format(name=name))
    file = folder / "pool" / f"{name}.deb"
    file.parent.mkdir()
    _run("dpkg-deb", "--root-owner-group", "--build", package, file)
    shutil.rmtree(package)
    index = folder / "dists" / suite / "main/binary-amd64/Packages"
    index.parent.mkdir(parents=True)
    content = file.read_bytes()
    index.write_text(
        CONTROL.format(name=name)
        + f"Filename: pool/{file.name}\nSize: {len(content)}\nSHA256: {_sha256(content)}\n"
    )
    listed = index.read_bytes()
    release = folder / "dists" / suite / "Release"
    release.write_text(
        f"Suite: {suite}\nCodename: {suite}\nDate: {formatdate(usegmt=True)}\n"
        f"Architectures: amd64\nComponents: main\nSHA256:\n"
        f" {_sha256(listed)} {len(listed)} main/binary-amd64/Packages\n"
    )
    (folder / "doc").mkdir()
    with tempfile.TemporaryDirectory() as keys:  # its path is short enough for a socket
        gpg = ("gpg", "--homedir", keys, "--batch", "--quiet")
        _run(*gpg, "--passphrase", "", "--quick-generate-key", "packages", "rsa2048", "sign")
        _run(*gpg, "--clearsign", "--output", release.with_name("InRelease"), release)
        _run(*gpg, "--armor", "--output", folder / "doc/apt-key.gpg", "--export")
        _run("gpgconf", "--homedir", keys, "--kill", "all")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
