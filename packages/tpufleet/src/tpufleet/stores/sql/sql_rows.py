"""Model objects to rows and back. `data` is the whole object; other columns serve queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import Host, HostId, HostLiveness, Progress
from tpufleet.model.fleet.slices import SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.jobs import Job
from tpufleet.model.people.users import Token
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.stores.sql.database import Row

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NEVER = 2**63 - 1
_RECORD_SEPARATOR, _UNIT_SEPARATOR = "\x1e", "\x1f"  # JSON escapes both, and ids have neither
# Nor can a column of Postgres hold a null character.
_NO_TEXT = dict.fromkeys(map(ord, (_RECORD_SEPARATOR, _UNIT_SEPARATOR, "\0")))
# Older SQLite accepts 999 parameters in one statement.
_BATCH_SIZE = 900


def to_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def end_micros(moment: datetime | None) -> int:
    """Of what may go on: the largest number then."""
    return _NEVER if moment is None else to_micros(moment)


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def to_text(value: object) -> str:
    return to_json(value).decode()


def job_row(job: Job) -> Row:
    spec = job.spec
    return (
        job.id,
        to_micros(job.submitted_at),
        job.owner,
        job.state.value,
        int(job.ended),
        spec.pool,
        spec.name,
        job.parent,
        to_text(job),
    )


def tag_rows(jobs: Iterable[Job]) -> list[Row]:
    return [(tag, job.id) for job in jobs for tag in dict.fromkeys(job.spec.tags)]


def attempt_row(attempt: Attempt) -> Row:
    return (
        attempt.id,
        attempt.job_id,
        attempt.number,
        int(not attempt.live),
        to_micros(attempt.created_at),
        end_micros(attempt.ended_at),
        to_text(attempt),
    )


def slice_row(tpu_slice: TpuSlice) -> Row:
    return (
        tpu_slice.id,
        to_micros(tpu_slice.requested_at),
        int(tpu_slice.state is SliceState.GONE),
        end_micros(tpu_slice.gone_since),
        tpu_slice.pool,
        tpu_slice.job_id,
        to_text(tpu_slice),
    )


def host_row(host: Host) -> Row:
    return (host.id, host.slice_id, host.index, to_text(host))


def event_row(event: Event) -> Row:
    return (
        event.seq,
        event.job_id,
        event.slice_id,
        event.pool,
        event.by,
        event.reservation,
        to_text(event),
    )


def token_row(token: Token) -> Row:
    return (token.id, token.user, token.hash, to_micros(token.created_at), to_text(token))


def heartbeat_row(liveness: HostLiveness) -> Row:
    progress = None if liveness.progress is None else to_text(liveness.progress)
    attempt_id = liveness.attempt_id  # from a host, so it may be any text
    if attempt_id is not None:
        attempt_id = AttemptId(attempt_id.translate(_NO_TEXT))
    return (liveness.host_id, to_micros(liveness.seen_at), attempt_id, progress)


def heartbeat_from_text(text: str) -> HostLiveness:
    host_id, seen_at, attempt_id, progress = units(text)
    return HostLiveness(
        host_id=HostId(host_id),
        seen_at=from_micros(int(seen_at)),
        attempt_id=AttemptId(attempt_id) if attempt_id else None,
        progress=from_json(progress, Progress) if progress else None,
    )


def split(rows: Sequence[Row]) -> list[Row]:
    """The rows of a SELECT of one joined column. The driver of SQLite gives up the interpreter for
    each row that it fetches, and beside a busy thread it waits to get it back: one row with all of
    them is fetched a thousand times faster."""
    return [(text,) for (joined,) in rows if joined for text in joined.split(_RECORD_SEPARATOR)]


def units(text: str) -> list[str]:
    """The columns of a row that were joined too."""
    return text.split(_UNIT_SEPARATOR)


def decode_all(rows: Sequence[Row], kind: type[T]) -> list[T]:
    """Objects from rows whose only column is `data`. Decoded as one list, which is faster."""
    return from_json(f"[{','.join(data for (data,) in rows)}]", list[kind])  # type: ignore[valid-type]


class CachingDecoder(Generic[T]):
    """Like `decode_all`, with a cache by text: the same lists are read again and again, and few
    rows change. Frozen objects can be shared."""

    def __init__(self, kind: type[T], max_size: int = 20_000) -> None:
        self._kind = kind
        self._max_size = max_size  # a job takes about 2 kB
        self._cache: dict[str, T] = {}

    def __call__(self, rows: Sequence[Row]) -> list[T]:
        cache = self._cache
        values = [cache.get(data) for (data,) in rows]
        missing = [index for index, value in enumerate(values) if value is None]
        if missing:
            if len(cache) + len(missing) > self._max_size:
                cache = self._cache = {}
            for index, value in zip(
                missing, decode_all([rows[index] for index in missing], self._kind), strict=True
            ):
                values[index] = cache[rows[index][0]] = value
        return values  # type: ignore[return-value]


def decode_first(rows: Sequence[Row], kind: type[T]) -> T | None:
    return from_json(rows[0][0], kind) if rows else None


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _BATCH_SIZE):
        yield values[start : start + _BATCH_SIZE]


def placeholders(values: Sequence[object]) -> str:
    """`?, ?, ?` for an IN list."""
    return ", ".join("?" * len(values))


def prefix_end(prefix: str) -> str | None:
    """The first text, by code point, after all that start with this. None: there is none."""
    kept = prefix.rstrip(chr(0x10FFFF))
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Surrogates are not characters.
    return kept[:-1] + chr(0xE000 if following == 0xD800 else following)
