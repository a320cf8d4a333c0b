"""The query language of job lists: `owner:me tag:sweep-* loss<0.3 since:7d -state:failed resnet`.

Terms are separated by spaces and all must match; `-` or `!` negates a term; `a,b` means either;
`*` and `?` are wildcards in the values of keys, except states and times. A word without a key is
searched in name, command, notes and tags. Case is ignored.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from tpufleet.errors import BadInput, invalid, no_value, too_long, unknown
from tpufleet.model.job.jobs import ENDED_STATES, LIVE_STATES, Job, JobState
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values import durations
from tpufleet.model.values.bounds import FIRST_DATE, LAST_DATE

MAX_QUERY = 1000  # characters
MAX_WORDS = 2000  # characters of a job that are searched
ME = "me"


class SearchField(StrEnum):
    OWNER = "owner"
    TAG = "tag"
    STATE = "state"
    NAME = "name"
    POOL = "pool"
    TYPE = "type"
    ID = "id"
    PARENT = "parent"


class FieldTerm(msgspec.Struct, frozen=True):
    """The field equals one of these values, or matches one with wildcards."""

    field: SearchField
    values: tuple[str, ...]
    negated: bool = False
    case_sensitive: frozenset[str] = frozenset()  # those of the values for which case counts


class TextTerm(msgspec.Struct, frozen=True):
    text: str  # lower case
    negated: bool = False


class MetricTerm(msgspec.Struct, frozen=True):
    """The last value that the job reported."""

    name: str
    operator: str  # <= >= != < > =
    value: float
    negated: bool = False


class SubmittedTerm(msgspec.Struct, frozen=True):
    """Submitted at this moment or later; `before`: earlier than that."""

    moment: datetime
    before: bool = False
    negated: bool = False


SearchTerm = FieldTerm | TextTerm | MetricTerm | SubmittedTerm


class JobSearch(msgspec.Struct, frozen=True):
    terms: tuple[SearchTerm, ...] = ()
    archived: bool | None = None  # `is:archived`; None: not stated

    @property
    def names_owner(self) -> bool:
        return any(
            isinstance(term, FieldTerm) and term.field is SearchField.OWNER for term in self.terms
        )

    def with_exact_owners(self, users: Collection[str]) -> JobSearch:
        """The name of a user means no other user whose name differs from it in case."""
        times = Counter(user.lower() for user in users)
        ambiguous = {user for user in users if times[user.lower()] > 1}
        terms = tuple(
            replace(term, case_sensitive=frozenset(ambiguous.intersection(term.values)))
            if isinstance(term, FieldTerm) and term.field is SearchField.OWNER
            else term
            for term in self.terms
        )
        return replace(self, terms=terms)


KEYS = (*(field.value for field in SearchField), "since", "until", "is")
_SYNONYMS = {
    "user": "owner",
    "by": "owner",
    "tags": "tag",
    "accelerator": "type",
    "before": "until",
}
_COMPARISON = re.compile(r"([A-Za-z_][\w./-]{0,99})(<=|>=|!=|<|>|=)(.*)", re.DOTALL)
_KEYED = re.compile(r"([a-z]+):(.*)", re.DOTALL)
STATE_GROUPS = {"live": LIVE_STATES, "ended": ENDED_STATES}


def parse_search(query: str, *, caller: str, now: datetime, zone: tzinfo = UTC) -> JobSearch:
    """BadInput names the term and what to write."""
    if len(query) > MAX_QUERY or "\0" in query:
        raise too_long(MAX_QUERY, field="query")
    terms: list[SearchTerm] = []
    archived: bool | None = None
    for written in filter(None, _split(query)):
        negated = written[0] in "-!" and len(written) > 1
        term = written[1:] if negated else written
        keyed = _KEYED.fullmatch(term)
        key = _SYNONYMS.get(keyed[1], keyed[1]) if keyed else ""
        if keyed and key == "is":
            archived = _archived(keyed[2], written) is not negated
        elif keyed and key in ("since", "until"):
            moment = _moment(keyed[2], written, now, zone)
            terms.append(SubmittedTerm(moment, key == "until", negated))
        elif keyed and key in KEYS:
            terms.append(_field_term(SearchField(key), keyed[2], written, caller, negated))
        elif comparison := _COMPARISON.fullmatch(term):
            terms.append(_metric_term(comparison, written, negated))
        elif keyed and "/" not in keyed[2]:  # a URL is text
            raise unknown("key", keyed[1], (*KEYS, *_SYNONYMS), repr(written))
        elif text := _folded(term):
            terms.append(TextTerm(text, negated))
    return JobSearch(tuple(terms), archived)


def _split(query: str) -> list[str]:
    lexer = shlex.shlex(query, posix=True, punctuation_chars="")
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    try:
        return list(lexer)
    except ValueError as error:
        raise BadInput("query: a quotation mark is not closed") from error


def _archived(value: str, written: str) -> bool:
    if value != "archived":
        raise unknown("value", value, ["archived"], repr(written))
    return True


def _field_term(
    field: SearchField, text: str, written: str, caller: str, negated: bool
) -> FieldTerm:
    values = [value for value in text.split(",") if value]
    if not values:
        raise no_value(repr(written), f"{field}:VALUE")
    if field is SearchField.STATE:
        values = [state for value in values for state in _states(value, written)]
    elif field is SearchField.OWNER:
        values = [caller if value == ME else value for value in values]
    elif field is SearchField.TYPE:
        values = [_accelerator(value) for value in values]
    return FieldTerm(field, tuple(dict.fromkeys(values)), negated)


def _states(value: str, written: str) -> list[str]:
    if value in STATE_GROUPS:
        return sorted(state.value for state in STATE_GROUPS[value])
    if value not in {state.value for state in JobState}:
        known = [*(state.value for state in JobState), *STATE_GROUPS]
        raise unknown("state", value, known, repr(written))
    return [value]


def _accelerator(value: str) -> str:
    """`v5e-16` is v5litepod-16; `v5e` is every size of it."""
    if has_wildcard(value):
        return re.sub(r"^v5e(?=-|\*|$)", "v5litepod", value)
    try:
        return type_lookup.find(value).name
    except BadInput:
        return re.sub(r"^v5e$", "v5litepod", value) + "-*"


def _metric_term(comparison: re.Match[str], written: str, negated: bool) -> MetricTerm:
    try:
        value = float(comparison[3])
    except ValueError as error:
        name, sign = comparison[1], comparison[2]
        example = f'{name}{sign}0.3, or "{written[:40]}" to search for the text'
        raise invalid(comparison[3], "a number", example, repr(written)) from error
    return MetricTerm(comparison[1], comparison[2], value, negated)


def _moment(text: str, written: str, now: datetime, zone: tzinfo) -> datetime:
    """`7d` ago, a date, or a date and time."""
    local = now.astimezone(zone)
    if text in ("today", "yesterday"):
        days = timedelta(days=text == "yesterday")
        return (local - days).replace(hour=0, minute=0, second=0, microsecond=0)
    try:
        span = durations.parse(text)
        if span is None:
            raise invalid(text, "a duration", "7d")
        moment = now - span
    except BadInput as error:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise durations.nor_a_date(f"{written!r}: {error}") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=zone)
    return min(max(moment, FIRST_DATE), LAST_DATE)


def has_wildcard(value: str) -> bool:
    return "*" in value or "?" in value


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


# What is searched of a job. Every store keeps these, or computes them.


def search_words(job: Job) -> str:
    spec = job.spec
    parts = (spec.name, job.id, *spec.command, spec.notes, *spec.tags)
    return _folded(" ".join(parts).replace("\0", " "))[:MAX_WORDS]


def search_tags(job: Job) -> str:
    """Each tag between line breaks, in lower case."""
    return "".join(f"\n{tag.lower()}" for tag in job.spec.tags) + "\n"


def matches_wildcard(pattern: str, text: str) -> bool:
    """`*` stands for any text, `?` for one character. fnmatch does not backtrack over stars."""
    return fnmatch.fnmatchcase(text.lower(), pattern.lower().replace("[", "[[]"))
