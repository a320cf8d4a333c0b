"""Backups: made while a server runs, checked, and restored into a new server."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests import postgres
from tests.contract import every_table
from tests.contract import store_builders as a
from tests.nested_folders import make_nested
from tests.policy.builders import make_job
from tests.polling import wait_until
from tests.server_process import Server
from tests.views.cli_runner import Tpu
from tpufleet import config, deep_folders
from tpufleet.compose import backup, control_plane, server_files
from tpufleet.errors import BadInput, Conflict
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.stores.base import ChangeSet, EventQuery, JobQuery
from tpufleet.stores.open_store import open_database, open_store
from tpufleet.stores.sql import schema_migrations


def settings(home: Path, **changes) -> config.Config:
    home.mkdir(mode=0o700, exist_ok=True)
    return structs.replace(config.load({"TPUFLEET_HOME": str(home)}, home), **changes)


def url_of(kind: str, folder: Path) -> str:
    return f"sqlite:///{folder}/fleet.db" if kind == "sqlite" else postgres.fresh_url()


def all_rows(url: str) -> every_table.Tables:
    with contextlib.closing(open_database(url)) as database:
        tables = every_table.rows_of(database)
    del tables["leases"]  # of the servers, not of the data
    return tables


@pytest.fixture(params=["sqlite", "postgres"])
def filled(request, tmp_path) -> tuple[config.Config, str]:
    """A database with every kind of row, and more events than are read at once."""
    home = tmp_path / "old"
    home.mkdir(mode=0o700)
    url = url_of(request.param, home)
    store = open_store(url)
    every_table.fill(store)
    store.commit(ChangeSet(events=[a.event()] * 12_000))
    store.close()
    (home / "token").write_text("tpf_x\n")
    (home / "secret").write_text("s\n")
    (home / "logs").mkdir()
    (home / "logs" / "large.log").write_bytes(b"x" * 100_000)
    return settings(home), url


@pytest.mark.parametrize("target", ["sqlite", "postgres"])
def test_every_row_and_file_is_restored_also_into_another_kind_of_database(
    filled, target, tmp_path
):
    old, url = filled
    file = tmp_path / "b.tar.gz"
    made = backup.create(old, url, file, ())
    assert file.stat().st_mode & 0o777 == 0o600
    assert made.rows > 12_000 and backup.verify(file) == made
    new = settings(tmp_path / "new")
    new_url = url_of(target, new.home)
    backup.restore(new, new_url, file)
    assert all_rows(new_url) == all_rows(url)
    restored = {
        str(path.relative_to(new.home)): path.stat().st_mode & 0o777
        for path in new.home.rglob("*") if path.is_file() and "fleet.db" not in path.name
    }  # fmt: skip
    files = ("token", "secret", "serve.lock", "restored-from")
    assert set(restored) == set(files)
    assert all(restored[name] == 0o600 for name in files[:-2])


def test_logs_and_checkpoints_are_included_on_request(tmp_path):
    old = settings(tmp_path / "old")
    url = url_of("sqlite", old.home)
    open_store(url).close()
    (old.home / "logs").mkdir()
    (old.home / "logs" / "a.log").write_text("line\n")
    backup.create(old, url, tmp_path / "b.tar.gz", ("logs", "checkpoints"))
    new = settings(tmp_path / "new")
    backup.restore(new, url_of("sqlite", new.home), tmp_path / "b.tar.gz")
    assert (new.home / "logs" / "a.log").read_text() == "line\n"


@pytest.mark.parametrize("levels", [1200, 1600, 3000])
def test_a_backup_skips_what_no_path_can_name_and_says_so(tmp_path, levels):
    old = settings(tmp_path / "old")
    open_store(url_of("sqlite", old.home)).close()
    checkpoints = old.home / "checkpoints"
    make_nested(checkpoints / "deep", levels, file=b"1")
    (checkpoints / "other").mkdir()
    (checkpoints / "other" / "state").write_bytes(b"12")
    (checkpoints / "other" / "link").symlink_to(old.home / "fleet.db")
    os.mkfifo(checkpoints / "other" / "pipe")
    file = tmp_path / "b.tar.gz"
    try:
        ran = Tpu(TPUFLEET_HOME=str(old.home))("backup", "--with", "checkpoints", str(file))
    finally:
        deep_folders.delete(checkpoints)
    assert ran.exit_code == 0, ran.output
    if levels > 1200:
        assert "\n  data/checkpoints/deep/d/d/" in ran.stderr
        assert "…: the path is too long\n" in ran.stderr
    new = settings(tmp_path / "new")
    report = backup.restore(new, url_of("sqlite", new.home), file)
    assert report == backup.verify(file)
    assert (new.home / "checkpoints" / "other" / "state").read_bytes() == b"12"
    assert [path.name for path in (new.home / "checkpoints" / "other").iterdir()] == ["state"]
    restored = deep_folders.size(new.home / "checkpoints" / "deep")
    assert (report.skipped, restored) == ((0, 1) if levels == 1200 else (1, 0))
    deep_folders.delete(new.home / "checkpoints")


def test_a_database_is_saved_before_its_migration_and_restored_by_the_version_before(tmp_path):
    used, version = settings(tmp_path / "home"), schema_migrations.newest_version()
    url = url_of("sqlite", used.home)
    assert backup.before_migration(used, url, version + 1) is None  # there is no database yet
    with contextlib.closing(open_store(url)) as store:
        every_table.fill(store)
    before = all_rows(url)
    (used.home / "secret").write_text("s\n")
    assert backup.before_migration(used, url, version) is None
    saved = backup.before_migration(used, url, version + 1)
    assert saved.name.startswith(f"schema-{version}-") and saved.stat().st_mode & 0o777 == 0o600
    (used.home / "fleet.db").rename(tmp_path / "new.db")
    backup.restore(used, url, saved)  # into the same state folder: it has only the database
    assert all_rows(url) == before


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o666])
def test_a_backup_that_others_can_read_or_change_is_refused(tmp_path, mode):
    old, new = settings(tmp_path / "old"), settings(tmp_path / "new")
    open_store(url_of("sqlite", old.home)).close()
    file = tmp_path / "b.tar.gz"
    backup.create(old, url_of("sqlite", old.home), file, ())
    file.chmod(mode)
    with pytest.raises(BadInput, match=f"{file} can be read by other users; run `chmod 600"):
        backup.restore(new, url_of("sqlite", new.home), file)
    assert not (new.home / "fleet.db").exists()
    file.chmod(0o600)
    backup.restore(new, url_of("sqlite", new.home), file)


@pytest.mark.parametrize("setting", ["secret_file", "admin_token_file"])
def test_a_server_does_not_start_with_a_secret_that_everyone_can_read(tmp_path, setting):
    path = tmp_path / "mounted"
    path.write_text("tpf_" + "s" * 40)
    path.chmod(0o644)
    wanted = settings(tmp_path / "home", **{setting: path})
    with pytest.raises(BadInput, match=f"{setting}: {path} can be read by other users"):
        control_plane.serve(wanted, embedded=False)


@pytest.mark.parametrize("damage", ["cut", "changed", "not a backup"])
def test_a_damaged_backup_is_refused_before_anything_is_written(tmp_path, damage):
    old = settings(tmp_path / "old")
    url = url_of("sqlite", old.home)
    open_store(url).close()
    (old.home / "secret").write_text("s\n")
    file = tmp_path / "b.tar.gz"
    backup.create(old, url, file, ())
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "changed":
        _change_member(file, "data/secret", b"t\n")
    else:
        file.write_text("hello")
    new = settings(tmp_path / "new")
    with pytest.raises(BadInput, match=r"complete backup|checksum of data/secret"):
        backup.restore(new, url_of("sqlite", new.home), file)
    assert list(new.home.iterdir()) == []


OUTSIDE = [
    "evil", "home", "home/.", "home/../../evil", "data//etc/evil", "data/./evil",
    "data/local/../../evil", "etc/passwd", "/etc/evil", "../evil", "data/secret/evil",
]  # fmt: skip


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_backup_with_a_name_that_cannot_be_restored_is_refused_before_anything_is_written(
    tmp_path, name, position
):
    old = settings(tmp_path / "old")
    url = url_of("sqlite", old.home)
    open_store(url).close()
    for each in ("secret", "token"):
        (old.home / each).write_text("s\n")
    file = tmp_path / "b.tar.gz"
    backup.create(old, url, file, ())
    _add_member(file, name, b"evil", 0 if position == "first" else -1)
    new = settings(tmp_path / "new")
    with pytest.raises(BadInput, match="no file of the state folder"):
        backup.restore(new, url_of("sqlite", new.home), file)
    assert list(new.home.iterdir()) == []


def test_a_copy_is_known_as_one_even_if_its_files_could_not_be_written(tmp_path):
    old, new = settings(tmp_path / "old"), settings(tmp_path / "new")
    url = url_of("sqlite", old.home)
    open_store(url).close()
    (old.home / "secret").write_text("s\n")
    (old.home / "faults.yaml").write_text("{}\n")
    file = tmp_path / "b.tar.gz"
    backup.create(old, url, file, ())
    (new.home / "faults.yaml").mkdir()
    with pytest.raises(OSError):
        backup.restore(new, url_of("sqlite", new.home), file)
    assert (new.home / "restored-from").read_text() == str(old.home)


def _add_member(file: Path, name: str, content: bytes, position: int) -> None:
    """With a manifest that names it."""
    with tarfile.open(file) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    added = tarfile.TarInfo(name)
    added.size = len(content)
    members.insert(position % len(members), (added, content))
    *others, (last, text) = members
    manifest = json.loads(text)
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    text = json.dumps(manifest).encode()
    last.size = len(text)
    with tarfile.open(file, "w:gz") as tar:
        for member, data in (*others, (last, text)):
            tar.addfile(member, io.BytesIO(data))


def _change_member(file: Path, name: str, content: bytes) -> None:
    with tarfile.open(file) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(file, "w:gz") as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(content if member.name == name else data))


def test_nothing_is_overwritten(tmp_path):
    old = settings(tmp_path / "old")
    url = url_of("sqlite", old.home)
    open_store(url).close()
    (old.home / "secret").write_text("s\n")
    file = tmp_path / "b.tar.gz"
    backup.create(old, url, file, ())
    with pytest.raises(Conflict, match=r"exists\n  next: choose another name"):
        backup.create(old, url, file, ())
    with pytest.raises(Conflict, match="restore into a new TPUFLEET_HOME"):
        backup.restore(old, url, file)


def test_a_copy_is_not_served_while_the_original_runs(tmp_path):
    old, new = settings(tmp_path / "old"), settings(tmp_path / "new")
    url = url_of("sqlite", old.home)
    open_store(url).close()
    file = tmp_path / "b.tar.gz"
    backup.create(old, url, file, ())
    backup.restore(new, url_of("sqlite", new.home), file)
    with server_files.exclusive_lock(old.home):
        with pytest.raises(Conflict, match=f"already running in {old.home}, and would control"):
            enter(backup.original_stopped(new.home))
        enter(backup.original_stopped(old.home))
        tpu = Tpu(TPUFLEET_HOME=str(new.home))
        for command in (["serve"], ["serve", "--stop", "--all"]):
            refused = tpu(*command)
            assert refused.exit_code != 0 and "already running" in refused.stderr
        other = tmp_path / "other"
        warned = Tpu(TPUFLEET_HOME=str(other))("restore", str(file))
        assert warned.exit_code == 0 and "warning: " in warned.stderr
    with backup.original_stopped(new.home):
        for folder in (old.home, other):  # neither the original nor another copy of it
            refused = Tpu(TPUFLEET_HOME=str(folder))("serve")
            assert refused.exit_code != 0 and "running" in refused.stderr
            assert f"next: TPUFLEET_HOME={new.home} tpu serve --stop" in refused.stderr
            refused = Tpu(TPUFLEET_HOME=str(folder))("serve", "--stop", "--all")
            assert refused.exit_code != 0 and f"{new.home}" in refused.stderr
    with server_files.exclusive_lock(old.home):
        refused = Tpu(TPUFLEET_HOME=str(old.home))("serve")
        assert f"already running in {old.home}\n" in refused.stderr


def test_the_next_step_of_a_restore_starts_the_server(tmp_path):
    old = settings(tmp_path / "old")
    open_store(url_of("sqlite", old.home)).close()
    backup.create(old, url_of("sqlite", old.home), tmp_path / "b.tar.gz", ())
    printed = Tpu(TPUFLEET_HOME=str(tmp_path / "new")).ok(
        "backup", "restore", str(tmp_path / "b.tar.gz")
    )
    assert printed.endswith("next: tpu serve\n")


def enter(context: contextlib.AbstractContextManager[None]) -> None:
    with context:
        pass


def test_restored_jobs_have_their_checkpoints_in_the_new_folder(tmp_path):
    """Not where the original server kept them, which may be gone, or closed to members."""
    old, new = settings(tmp_path / "old"), settings(tmp_path / "new")
    url = url_of("sqlite", old.home)
    store = open_store(url)
    kept = replace(make_job("own"), checkpoint=f"{old.data}/checkpoints/own")
    bucket = replace(make_job("bucket"), checkpoint="gs://b/checkpoints/x")
    store.commit(ChangeSet(new_jobs=[kept, bucket]))
    store.close()
    saved = old.data / "checkpoints" / "own" / "step-240"
    saved.parent.mkdir(parents=True)
    saved.write_text("240")
    backup.create(old, url, tmp_path / "b.tar.gz", ("checkpoints",))
    backup.restore(new, url_of("sqlite", new.home), tmp_path / "b.tar.gz")
    store = open_store(url_of("sqlite", new.home))
    places = {job.id: job.checkpoint for job in store.jobs(JobQuery())}
    store.close()
    assert places == {"own": f"{new.data}/checkpoints/own", "bucket": "gs://b/checkpoints/x"}
    assert (Path(places["own"]) / "step-240").read_text() == "240"


def test_a_new_server_takes_over_running_jobs_from_a_backup(tmp_path):
    old = Server(tmp_path / "old")
    new = Server(tmp_path / "new")
    script = (
        "import pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path / 'finish')!r}).exists(): time.sleep(0.1)"
    )
    try:
        old.start()
        spec = {"name": "job", "command": [sys.executable, "-c", script], "accelerator": "v5e-4"}
        old.client.put_secret("wandb", "key-of-ada")
        old.client.submit([NewJob(id=JobId("job-1"), spec=spec)])
        wait_until(lambda: old.client.job("job-1").job.state is JobState.RUNNING, 90, old.log_tail)
        file = tmp_path / "b.tar.gz"
        backup.create(settings(old.home), f"sqlite:///{old.home}/fleet.db", file, ())
        old.kill()
        backup.restore(settings(new.home), f"sqlite:///{new.home}/fleet.db", file)
        new.start()
        assert new.url == old.url  # so agents find it
        events = new.client.events().events
        (tmp_path / "finish").touch()
        wait_until(lambda: new.client.job("job-1").job.ended_at is not None, 90, new.log_tail)
        detail = new.client.job("job-1")
        assert detail.job.state is JobState.SUCCEEDED
        assert [attempt.state for attempt in detail.attempts] == [AttemptState.ENDED]
        assert new.client.secrets().own == ("wandb",)
        store = open_store(f"sqlite:///{new.home}/fleet.db")
        assert len(store.events(EventQuery())) > len(events)
        store.close()
        wait_until(lambda: not new.client.slices(), 60, new.log_tail)
    finally:
        new.cleanup()
        old.cleanup()
