"""A release is signed, and whoever installs it can check that nothing was changed, added or left
out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = ("tpufleet-1.0-py3-none-any.whl", "tpufleet-1.0.tar.gz", "tpufleet-1.0.cdx.json")

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def new_key(folder: Path, name: str) -> Path:
    key = folder / name
    arguments = ["-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
    subprocess.run(["ssh-keygen", *arguments], check=True)
    return key


def run(script: str, *arguments: object, key: Path | None = None) -> tuple[int, str]:
    environ = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    if key is not None:
        environ["TPUFLEET_RELEASE_KEY"] = str(key)
    done = subprocess.run(
        [SCRIPTS / script, *map(str, arguments)], env=environ, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def signers(tmp_path: Path) -> Path:
    path = tmp_path / "signers"
    path.write_text(f"release@tpufleet {new_key(tmp_path, 'key').with_suffix('.pub').read_text()}")
    return path


@pytest.fixture
def release(tmp_path: Path, signers: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f"content of {name}")
    status, output = run("sign-release", folder, key=tmp_path / "key")
    assert status == 0, output
    return folder


def test_a_release_that_was_not_changed_is_verified(release, signers):
    status, output = run("verify-release", release, signers)
    assert status == 0 and output.endswith(f"verified: {len(FILES)} files\n"), output


def forge_checksums(release: Path) -> None:
    (release / FILES[0]).write_text("malware")
    subprocess.run("sha256sum -- tpufleet* > SHA256SUMS", shell=True, check=True, cwd=release)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / FILES[0]).write_text("malware"), "not the one that was signed"),
        (lambda folder: (folder / FILES[1]).unlink(), "not the one that was signed"),
        (lambda folder: (folder / "extra.whl").write_text("malware"), "is not part of the release"),
        (forge_checksums, "was not signed with a key"),
        (lambda folder: (folder / "SHA256SUMS.sig").unlink(), "SHA256SUMS.sig is missing"),
    ],
    ids=["changed", "left out", "added", "new checksums", "no signature"],
)
def test_a_release_that_was_changed_is_refused(release, signers, change, message):
    change(release)
    status, output = run("verify-release", release, signers)
    assert status == 1 and message in output


def test_a_release_that_somebody_else_signed_is_refused(release, signers, tmp_path):
    assert run("sign-release", release, key=new_key(tmp_path, "other"))[0] == 0
    status, output = run("verify-release", release, signers)
    assert status == 1 and "was not signed with a key" in output


def test_a_signature_for_another_purpose_is_refused(release, signers, tmp_path):
    """Such as one of a Git commit with the same key."""
    (release / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", tmp_path / "key", "-n", "git", "SHA256SUMS"]
    subprocess.run(command, check=True, cwd=release, capture_output=True)
    assert run("verify-release", release, signers)[0] == 1


def test_nothing_is_released_without_a_signature(release):
    if shutil.which("cosign", path="/usr/bin:/bin"):
        pytest.skip("cosign signs without a key of ours")
    status, output = run("sign-release", release)
    assert status == 1 and "TPUFLEET_RELEASE_KEY is not set" in output and "next:" in output


@pytest.mark.slow
def test_a_release_is_built_described_and_signed(tmp_path, signers):
    """All of `scripts/release`, with a key of its own."""
    needed = ("git", "bash", "npm")
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    for command in (
        ["npm", "ping"],
        [sys.executable, "-m", "pip", "download", "--no-deps", "idna"],
    ):
        if subprocess.run(command, cwd=tmp_path, capture_output=True).returncode != 0:
            pytest.skip(f"`{' '.join(command[:4])}` cannot reach its registry")
    clone = tmp_path / "clone"
    done = subprocess.run(
        ["git", "clone", "--quiet", "--local", SCRIPTS.parent, clone], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"needs the repository: {done.stderr.decode()[:200]}")
    environ = {
        **os.environ,
        "PATH": f"{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}",
        "TPUFLEET_RELEASE_KEY": str(tmp_path / "key"),
    }
    done = subprocess.run(
        [clone / "scripts" / "release"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dist = clone / "dist"
    assert run("verify-release", dist, signers)[0] == 0
    [bill] = dist.glob("*.cdx.json")
    described = json.loads(bill.read_text())
    names = {component["name"].lower() for component in described["components"]}
    assert described["bomFormat"] == "CycloneDX" and {"click", "httpx", "msgspec"} <= names
    pins = (clone / "requirements" / "test.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", pins, re.MULTILINE))
    installed = {each["name"].lower(): each["version"] for each in described["components"]}
    shared = installed.keys() & locked.keys()
    assert len(shared) > 10 and all(installed[name] == locked[name] for name in shared)
    assert list(dist.glob("*.whl")) and list(dist.glob("*.tar.gz"))
