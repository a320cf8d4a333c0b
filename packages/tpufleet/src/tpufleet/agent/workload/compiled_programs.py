"""Where the attempts of a job find the programs that earlier ones compiled: JAX's own cache, in a
folder on the host that outlives them, and with checkpoints in a bucket also there, for other hosts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event

from tpufleet.agent import threads
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import attempt_folder, untrusted_files
from tpufleet.agent.workload.containment import Containment
from tpufleet.agent.workload.environment_variables import SIMULATED_PLATFORM
from tpufleet.errors import FleetError, NotFound
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.runtime import gcs
from tpufleet.runtime.distributed import CACHE_OPTIONS, COMPILED_VARIABLE
from tpufleet.runtime.gcs import Bucket

FOLDER = "compiled"
DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
KEPT_JOBS = 8  # on this host, where jobs have no folder that the server deletes with them
ARCHIVES = ".compiled"  # in the checkpoint location; the dot says that it is no checkpoint
MAX_ARCHIVE_BYTES = 2 * 2**30
FIRST_UPLOAD_SECONDS, MAX_UPLOAD_SECONDS = 3.0, 600.0  # twice as long after each upload
# A command starts without the programs of other hosts, if they take longer.
FETCH_TIMEOUT_SECONDS = 60.0
_PROGRAM = re.compile(r"[\w.<>+-]{1,240}-cache")  # as JAX names them


def variables(folder: Path, assignment: Assignment, environ: Mapping[str, str]) -> dict[str, str]:
    """Nothing for jobs that chose a folder themselves. In a gang, `runtime.initialize` makes each
    process write its programs: JAX writes those of process 0 alone, which would then wait for the
    others in its first collective, with a timeout, each time."""
    if DIRECTORY in environ:
        return {}
    if assignment.num_processes * assignment.processes_per_host > 1:
        return {COMPILED_VARIABLE: str(folder)}
    return {DIRECTORY: str(folder)} | {
        name.upper(): str(each) for name, each in CACHE_OPTIONS.items()
    }


def open_folder(assignment: Assignment, work_dir: Path, containment: Containment) -> Path:
    """On simulated slices one for all of them, elsewhere one on each host."""
    shared = containment.beside_checkpoint(assignment.checkpoint, FOLDER)
    return shared or attempt_folder.lineage_folder(assignment, work_dir / FOLDER, KEPT_JOBS)


def open_archives(
    assignment: Assignment, settings: AgentSettings, folder: Path
) -> ProgramArchives | None:
    """None where the checkpoints are in no bucket, or where the agent has the credentials of the
    server, so that jobs of members must not choose what it writes."""
    own = settings.platform != SIMULATED_PLATFORM or assignment.owned_by_admin
    if not own or not assignment.checkpoint.startswith(gcs.SCHEME):
        return None
    bucket = Bucket(f"{attempt_folder.lineage_location(assignment)}/{ARCHIVES}")
    return ProgramArchives(bucket, folder, assignment.process_id)


class ProgramArchives:
    """The programs of process 0 in one object, and in one for each other process those that process
    0 does not have. The host of a process alone writes its objects, and a start costs each host
    four requests, however many programs and hosts there are."""

    def __init__(self, bucket: Bucket, folder: Path, process_id: int) -> None:
        self._bucket = bucket
        self._folder = folder
        self._process_id = process_id
        self._uploaded: frozenset[str] = frozenset()

    def run(self, fetched: Event, ended: Event) -> None:
        """Fetch, then upload what is new until the attempt has ended, and once more then."""
        self._logged("fetch", self.fetch)
        fetched.set()
        wait, before, last = FIRST_UPLOAD_SECONDS, frozenset[str](), False
        while not last:
            last = ended.wait(wait)
            programs = self._programs()
            # One that appeared since the last look may not be complete.
            if (programs == before or last) and not programs <= self._uploaded:
                self._logged("upload", self.upload)
                wait = min(2 * wait, MAX_UPLOAD_SECONDS)
            before = programs

    def fetch(self) -> None:
        for process in sorted({0, self._process_id}):
            listed = self._listed(process)
            if not listed <= self._programs():
                path = self._folder.with_name(f"{self._folder.name}-{process}.zip")
                try:
                    self._bucket.download(f"{process}.zip", path)
                    self._unpack(path)
                finally:
                    path.unlink(missing_ok=True)
            self._uploaded |= listed

    def upload(self) -> None:
        """Of a process that is not the first, nothing before that one has uploaded its own."""
        programs = self._newest(self._programs())
        if self._process_id != 0:
            of_first = self._listed(0)
            if not of_first:
                return
            programs = [name for name in programs if name not in of_first]
        if programs:
            path = self._folder.with_name(f"{self._folder.name}-own.zip")
            try:
                self._pack(path, programs)
                self._bucket.upload(f"{self._process_id}.zip", path)
            finally:
                path.unlink(missing_ok=True)
            self._bucket.write(f"{self._process_id}.json", json.dumps(programs).encode())
        self._uploaded = self._programs()

    def _logged(self, what: str, act: Callable[[], None]) -> None:
        """Without them, programs are compiled again."""
        try:
            act()
        except (FleetError, OSError, ValueError, zipfile.BadZipFile) as error:
            threads.log(f"cannot {what} compiled programs: {self._bucket.url}: {error}")

    def _listed(self, process: int) -> frozenset[str]:
        try:
            return frozenset(json.loads(self._bucket.read(f"{process}.json")))
        except NotFound:
            return frozenset()

    def _programs(self) -> frozenset[str]:
        names = untrusted_files.list_named_by_job(self._folder)
        return frozenset(name for name in names if _PROGRAM.fullmatch(name))

    def _newest(self, programs: frozenset[str]) -> list[str]:
        """As many as may be in an archive."""
        found = []
        for name in programs:
            status = os.stat(self._folder / name, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, name, status.st_size))
        total, newest = 0, []
        for _, name, size in sorted(found, reverse=True):
            if (total := total + size) > MAX_ARCHIVE_BYTES:
                break
            newest.append(name)
        return newest

    def _pack(self, path: Path, programs: Sequence[str]) -> None:
        """As they are: JAX has compressed them."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name in programs:
                descriptor = untrusted_files.open_below(
                    self._folder, name, untrusted_files.READ_FLAGS
                )
                with open(descriptor, "rb") as program, archive.open(name, "w") as packed:
                    shutil.copyfileobj(program, packed)

    def _unpack(self, path: Path) -> None:
        present = self._programs()
        with zipfile.ZipFile(path) as archive:
            for each in archive.infolist():
                stored = each.compress_type == zipfile.ZIP_STORED  # so it cannot be a bomb
                if stored and _PROGRAM.fullmatch(each.filename) and each.filename not in present:
                    untrusted_files.write_below(
                        self._folder, Path(each.filename), archive.read(each)
                    )
