"""The query language of job lists."""

from __future__ import annotations

import fnmatch
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract import store_builders as a
from tests.contract.search_matching import matches
from tpufleet.errors import BadInput
from tpufleet.model.job.job_search import (
    FieldTerm,
    JobSearch,
    MetricTerm,
    SearchField,
    SubmittedTerm,
    TextTerm,
    matches_wildcard,
    parse_search,
)
from tpufleet.model.job.jobs import JobState

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)


def parse(query, **more):
    return parse_search(query, **{"caller": "ada", "now": NOW, **more})


@pytest.mark.parametrize(
    ("query", "term"),
    [
        ("owner:me", FieldTerm(SearchField.OWNER, ("ada",))),
        ("user:bob,me", FieldTerm(SearchField.OWNER, ("bob", "ada"))),
        ("tag:sweep-*", FieldTerm(SearchField.TAG, ("sweep-*",))),
        ("-tag:old", FieldTerm(SearchField.TAG, ("old",), negated=True)),
        ("state:failed", FieldTerm(SearchField.STATE, ("failed",))),
        ("state:ended", FieldTerm(SearchField.STATE, ("cancelled", "failed", "succeeded"))),
        ("type:v5e-16", FieldTerm(SearchField.TYPE, ("v5litepod-16",))),
        ("type:v5e", FieldTerm(SearchField.TYPE, ("v5litepod-*",))),
        ("loss<0.3", MetricTerm("loss", "<", 0.3)),
        ("eval/acc>=9e-1", MetricTerm("eval/acc", ">=", 0.9)),
        ("since:7d", SubmittedTerm(NOW - timedelta(days=7))),
        ("until:2026-01-31", SubmittedTerm(datetime(2026, 1, 31, tzinfo=UTC), before=True)),
        ("ResNet", TextTerm("resnet")),
        ('"two  words"', TextTerm("two words")),
        ('-"--lr 0.1"', TextTerm("--lr 0.1", negated=True)),
        ("gs://bucket/x", TextTerm("gs://bucket/x")),
    ],
)
def test_one_term(query, term):
    assert parse(query) == JobSearch((term,))


def test_terms_are_combined_and_archived_jobs_are_asked_for():
    search = parse("owner:me loss<0.3  -state:failed is:archived resnet")
    assert len(search.terms) == 4 and search.archived is True and search.names_owner
    assert parse("-is:archived").archived is False
    assert parse("  ") == JobSearch()


def test_dates_are_in_the_time_zone_of_the_reader():
    berlin = ZoneInfo("Europe/Berlin")
    (term,) = parse("since:today", zone=berlin).terms
    assert term == SubmittedTerm(datetime(2026, 3, 9, 23, tzinfo=UTC))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("state:sleeping", "unknown state 'sleeping'; write one of queued"),
        ("colour:red", "unknown key 'colour'; write one of owner"),
        ("sate:failed", "unknown key 'sate'; did you mean state"),
        ("owner:", "no value; write owner:VALUE"),
        ("loss<low", "'low' is not a number; for example loss<0.3"),
        ("since:whenever", "'whenever' is not a duration; for example 90s, .*or a date such as"),
        ("since:9999d", "must be from zero to ten years"),
        ("since:none", "for example 7d"),
        ("is:lost", "unknown value 'lost'; write one of archived"),
        ('"open', "quotation mark is not closed"),
    ],
)
def test_an_invalid_term_says_what_to_write(query, message):
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        parse(query)


def test_a_job_is_found_by_name_command_notes_tags_and_metrics():
    job = a.job("k3f9", called="resnet-50", tags=("Sweep-3",), state=JobState.FAILED)
    found = lambda query: matches(job, parse(query), {"loss": 0.25, "step": 900.0})
    assert found("resnet") and found("train.py") and found("sweep") and found("name:res*-5?")
    assert found("tag:sweep-3") and found("tag:sweep-*") and not found("tag:weep-*")
    assert found("loss<0.3 step>100 state:failed") and not found("loss>=0.3")
    assert not found("accuracy>0") and found("-accuracy>0")


words = st.text(max_size=20)


@given(
    words
    | st.lists(st.sampled_from([*"-:,<>=*?\"' ", "loss", "tag", "since", "9", "me"])).map("".join)
)
def test_any_text_is_a_query_or_an_error_that_names_it(query):
    try:
        search = parse(query)
    except BadInput:
        return
    matches(a.job(), search, {"loss": 1.0})


safe = st.text("abcxyz019-_.", min_size=1, max_size=8).filter(lambda text: text[0] not in "-.")


@given(st.lists(safe, min_size=1, max_size=4), safe)
def test_a_quoted_tag_and_a_word_are_read_as_written(tags, word):
    query = f"tag:{','.join(tags)} {word}"
    assert parse(query).terms == (
        FieldTerm(SearchField.TAG, tuple(dict.fromkeys(tags))),
        TextTerm(word.lower()),
    )


@given(st.text("ab*?", max_size=12), st.text("ab", max_size=12))
def test_wildcards_match_as_in_shells(pattern, text):
    assert matches_wildcard(pattern, text) == fnmatch.fnmatchcase(text, pattern)


def test_a_wildcard_takes_no_time_whatever_it_contains():
    assert not matches_wildcard("*a" * 90 + "*b", "a" * 10_000)
