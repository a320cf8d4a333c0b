"""Datasets whose shards are divided among folders on several disks, which write and read at once.

Everything but the shards is in the first folder, with the list of the others. A shard may be in any
of them: it is looked for where it would be written, then in the others, so that disks can be added
and files moved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpufleet.errors import BadInput, Conflict, FleetError, NotFound
from tpufleet.runtime.units import Claim, Units
from tpufleet_activations import plans
from tpufleet_activations.formatting import extract_command
from tpufleet_activations.input_errors import unreadable
from tpufleet_activations.io import shards
from tpufleet_activations.io.shard_writer import ShardTarget
from tpufleet_activations.io.storage import DiskMissing, LocalFolder

STRIPES_FILE = "stripes.json"  # in the first folder: the id of the dataset, and the other folders
MARKER = plans.STRIPE_FILE  # in each of the others: an empty mount point has none
SHARDS = shards.FOLDER
# Of a shard. Several are written at a time, so that all disks are busy.
FILE_BYTES = 64 << 20
LOW_SPACE = 2 << 30  # a disk with less is passed over while another one has more


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeStatus:
    """One of the folders of a dataset."""

    folder: Path
    missing: bool
    shards: int = 0
    bytes: int = 0
    free: int = 0


class StripedFolder(LocalFolder):
    """A folder with the records and some of the shards, and folders with the other shards."""

    file_bytes: int | None = FILE_BYTES

    def __init__(self, path: str | Path, disk: str = "auto"):
        super().__init__(path, disk)
        self._id, self.others = _read_list(self)

    @cached_property
    def _folders(self) -> list[LocalFolder]:
        """Of all disks, which have to be there."""
        for folder in self.others:
            try:
                owner = _owner(folder)
            except OSError as error:
                raise DiskMissing(self._lost(folder, str(error))) from error
            if owner is None:
                raise DiskMissing(self._lost(folder, f"no {MARKER} there"))
            if owner != self._id:
                raise plans.other_dataset(folder, f"not {self.url}")
        first = LocalFolder(self.path, self._disk)
        return [first, *(LocalFolder(folder, self._disk) for folder in self.others)]

    @cached_property
    def _written(self) -> list[LocalFolder]:
        """The same, for writing and deleting: none may hold another dataset, whose shards may have
        the same names."""
        for folder in self.others:
            if (folder / plans.PLAN_FILE).exists():
                raise Conflict(
                    f"{folder}, one of the folders of {self.url}, holds a dataset of its own; run "
                    f"{extract_command('stripe', self.url, '--without', str(folder))}"
                )
        return self._folders

    def _lost(self, folder: Path, reason: str) -> str:
        leave_out = extract_command("stripe", self.url, "--without", str(folder))
        return (
            f"{folder}, which holds shards of {self.url}, is missing ({reason}); mount its disk. "
            f"If it is lost, run {leave_out}, then {extract_command('repair', self.url)}"
        )

    def new_shard(self, name: str, draft: str) -> ShardTarget:
        free = [shutil.disk_usage(folder.path).free for folder in self._written]
        return self._written[choose_folder(name, free)].new_shard(name, draft)

    def write_mode(self) -> str:
        modes = {folder.write_mode() for folder in self._written}
        return modes.pop() if len(modes) == 1 else "mixed"

    def upload(self, draft: Path, name: str) -> None:
        if not name.startswith(SHARDS):
            super().upload(draft, name)
            return
        own = next(folder for folder in self._written if draft.is_relative_to(folder.path))
        own.upload(draft, name)

    def delete(self, name: str) -> None:
        if not name.startswith(SHARDS):
            super().delete(name)
            return
        for folder in self._written:
            folder.delete(name)

    def read(self, name: str) -> bytes:
        return self._holder(name).read(name) if name.startswith(SHARDS) else super().read(name)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        if not name.startswith(SHARDS):
            return super().read_range(name, start, size)
        return self._holder(name).read_range(name, start, size)

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        if not prefix.startswith(SHARDS):
            return super().names(prefix, start, end)
        listed = (folder.names(prefix, start, end) for folder in self._folders)
        return sorted({name for names in listed for name in names})

    def fullest_disk(self) -> Path:
        return min(
            (folder.path for folder in self._folders), key=lambda path: shutil.disk_usage(path).free
        )

    def _existing(self, name: str) -> Path:
        return (
            self._holder(name).path / name if name.startswith(SHARDS) else super()._existing(name)
        )

    def _holder(self, name: str) -> LocalFolder:
        first = folder_number(name, len(self._folders))
        for folder in (*self._folders[first:], *self._folders[:first]):
            if (folder.path / name).exists():
                return folder
        raise NotFound(f"{name} is in none of the {len(self._folders)} folders of {self.url}")


def stripes(out: LocalFolder) -> list[StripeStatus]:
    """What is in each folder of a dataset, also of disks that are missing."""
    if not is_striped(out):
        return [_status(out.path)]
    dataset, others = _read_list(out)
    return [_status(out.path), *(_status(folder, dataset) for folder in others)]


def folder_number(name: str, count: int) -> int:
    """Round-robin: shards of one unit are on different disks, and so are first ones of units."""
    unit, _, *rest = [int(number) for number in re.findall(r"\d+", name)] or [0, 0]
    return (unit + sum(rest)) % count


def choose_folder(name: str, free: Sequence[int]) -> int:
    """The folder for a new shard. `free` are the free bytes of each."""
    first = folder_number(name, len(free))
    order = (*range(first, len(free)), *range(first))
    return next((number for number in order if free[number] >= LOW_SPACE), first)


def is_striped(folder: LocalFolder) -> bool:
    return (folder.path / STRIPES_FILE).exists()


def set_folders(out: LocalFolder, folders: Sequence[str | Path]) -> StripedFolder:
    """Divide the shards of a dataset among its own folder and these. Shards that are stored stay
    where they are, so a folder that holds some can only be left out once its disk is lost."""
    wanted, dataset = check_folders(out, folders)
    before = _read_list(out)[1] if is_striped(out) else []
    undo: list[Callable[[], None]] = []
    try:
        for folder in wanted:
            if _owner(folder) != dataset:
                undo += [(folder / MARKER).unlink, *(path.rmdir for path in _absent(folder))]
                marker = {"dataset": dataset, "of": out.url}
                LocalFolder(folder).replace(MARKER, json.dumps(marker).encode())
        body = {"dataset": dataset, "folders": [str(folder) for folder in wanted]}
        out.replace(STRIPES_FILE, json.dumps(body, indent=2).encode())
    except BaseException:
        for step in undo:
            with suppress(OSError):
                step()
        raise
    for folder in before:
        if folder not in wanted:
            _remove_marker(folder, dataset)
    return StripedFolder(out.path)


def _absent(folder: Path) -> list[Path]:
    """The folder and its parents, as far as they do not exist; innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_marker(folder: Path, dataset: str) -> None:
    """Of a folder that is no longer in use. Without it, another dataset can use it; its disk may
    be lost."""
    with suppress(OSError, FleetError):
        if _owner(folder) == dataset:
            (folder / MARKER).unlink()


def leave_out(out: LocalFolder, folders: Sequence[str | Path]) -> StripedFolder:
    """Use the folders of a dataset but these, whose disks are lost or whose shards were moved."""
    others = _read_list(out)[1] if is_striped(out) else []
    unwanted = [Path(folder).absolute() for folder in folders]
    for folder in unwanted:
        if folder not in others:
            raise BadInput(
                f"{folder} is not one of the folders of {out.url}; "
                f"{extract_command('stripe', out.url)} shows them"
            )
    return set_folders(out, [folder for folder in others if folder not in unwanted])


def check_folders(out: LocalFolder, folders: Sequence[str | Path]) -> tuple[list[Path], str]:
    """The folders as absolute paths and the id of the dataset, or an error if they cannot be
    used."""
    wanted = [Path(folder).absolute() for folder in folders]
    resolved = [folder.resolve() for folder in (out.path, *wanted)]  # without symbolic links
    if len(set(resolved)) <= len(wanted):
        raise _not_separate(out.path, *wanted)
    for number, folder in enumerate(resolved):
        for other in resolved[:number]:
            if folder.is_relative_to(other) or other.is_relative_to(folder):
                raise _not_separate(folder, other)
    dataset, before = _read_list(out) if is_striped(out) else (uuid.uuid4().hex, [])
    for folder in before:
        if folder not in wanted and not _status(folder, dataset).missing:
            _check_unneeded(folder, out, before)
    for folder in wanted:
        _check_usable(folder, out, dataset)
    return wanted, dataset


def _not_separate(*folders: Path) -> BadInput:
    listed = ", ".join(map(str, folders))
    return BadInput(f"{listed} have to be separate folders, each on a disk and named once")


def _check_usable(folder: Path, out: LocalFolder, dataset: str) -> None:
    """Raise if a folder holds files that could be taken for shards of this dataset."""
    owner = _owner(folder)
    if owner not in (None, dataset) and not _is_unused(folder, out):
        raise plans.other_dataset(folder, MARKER)
    if (folder / plans.PLAN_FILE).exists():
        raise plans.other_dataset(folder, plans.PLAN_FILE)
    if owner != dataset and (folder / SHARDS).exists() and any((folder / SHARDS).iterdir()):
        raise plans.other_dataset(folder, SHARDS)
    for parent in folder.resolve().parents:
        if plans.holds_dataset(LocalFolder(parent)):
            raise plans.other_dataset(parent, f"{folder} is inside")


def _check_unneeded(folder: Path, out: LocalFolder, others: Sequence[Path]) -> None:
    """Raise if a folder that is to be left out holds shards of this dataset. It may hold any other
    files, if it was added by mistake."""
    own = _own_shards(folder, out, [out.path, *(path for path in others if path != folder)])
    if not own:
        return
    other = len(os.listdir(folder / SHARDS)) - len(own)
    some = ", ".join(own[:4]) + (", …" if len(own) > 4 else "")
    raise Conflict(
        f"{folder} holds {len(own):,} shards of {out.url} ({some}) and {other:,} other files\n"
        f"  next: move the shards first, such as with `mv -n {folder}/shards/NAME "
        f"{out.path}/shards/`"
    )


def _own_shards(folder: Path, out: LocalFolder, others: Sequence[Path]) -> list[str]:
    """Names of the shards in a folder that this dataset needs: those that a commit refers to and no
    other folder holds, and those of units that are being written."""
    if not (folder / SHARDS).is_dir() or not (out.path / plans.PLAN_FILE).exists():
        return []
    records = LocalFolder(out.path)
    view = Units(records, count=plans.load(records).units, worker="reader", tolerant=True)
    commits, claims = view.committed(), view.open_claims()
    files = {
        file["name"]: shards.ShardFile.from_json(file)
        for commit in commits.values()
        for file in commit.outcome["files"]
    }
    planned = (folder / plans.PLAN_FILE).exists()
    own = []
    for entry in sorted(os.listdir(folder / SHARDS)):
        name = SHARDS + entry
        parsed = shards.parse_name(name)
        if name in files:
            needed = _holds(folder, files[name]) and not any(_holds(o, files[name]) for o in others)
        else:
            # In a folder with a dataset of its own, they are more likely of that.
            open_unit = parsed is not None and (
                _is_claimed(parsed, claims) or parsed.unit in view.damaged
            )
            needed = open_unit and not planned
        if needed:
            own.append(entry)
    return own


def _is_claimed(shard: shards.ShardName, claims: Mapping[int, Claim]) -> bool:
    return shard.unit in claims and shard.token <= claims[shard.unit].token


def _holds(folder: Path, file: shards.ShardFile) -> bool:
    """Whether the shard is there. That of another dataset may have the same name."""
    try:
        if (folder / file.name).stat().st_size != file.size:
            return False
        header = LocalFolder(folder).read_range(file.name, 0, file.header_size)
    except (OSError, NotFound):
        return False
    return hashlib.sha256(header).hexdigest() == file.header_sha256


def _read_list(out: LocalFolder) -> tuple[str, list[Path]]:
    try:
        body = json.loads((out.path / STRIPES_FILE).read_bytes())
        return body["dataset"], [Path(folder) for folder in body["folders"]]
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(out.path / STRIPES_FILE, error) from error


def _is_unused(folder: Path, out: LocalFolder) -> bool:
    """Whether a marked folder is that of an earlier call which could not write the list."""
    marker = json.loads((folder / MARKER).read_bytes())
    return marker.get("of") == out.url and not any(folder.glob(f"{SHARDS}*"))


def _owner(folder: Path) -> str | None:
    """The id of the dataset that a folder belongs to, or None."""
    try:
        return json.loads((folder / MARKER).read_bytes())["dataset"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(folder / MARKER, error) from error


def _status(folder: Path, dataset: str | None = None) -> StripeStatus:
    """`dataset` None: of the folder with the records."""
    try:
        missing = dataset is not None and _owner(folder) != dataset
    except OSError:  # its disk cannot be read
        missing = True
    if missing:
        return StripeStatus(folder=folder, missing=True)
    sizes = []
    if (folder / SHARDS).is_dir():
        with os.scandir(folder / SHARDS) as entries:
            sizes = [
                entry.stat().st_size
                for entry in entries
                if entry.is_file() and shards.parse_name(SHARDS + entry.name) is not None
            ]
    return StripeStatus(
        folder=folder,
        missing=False,
        shards=len(sizes),
        bytes=sum(sizes),
        free=shutil.disk_usage(folder).free,
    )
