"""Every billed chip hour has one owner, and lost work is separated from useful work."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.errors import BadInput
from tpufleet.model.fleet.pools import CapacityRefusal
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, Job, JobId, JobSpec
from tpufleet.model.people.costs import Badput, SettledCosts
from tpufleet.model.tpu import prices, tpu_types
from tpufleet.policy.accounting import costs, goodput

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def tpu_slice(name: str, **more) -> TpuSlice:
    facts = {
        "id": SliceId(name), "provider": "tpu-vm", "accelerator": "v5litepod-4", "zone": "z",
        "capacity": Capacity.SPOT, "request_group": name, "requested_at": START,
    }  # fmt: skip
    return TpuSlice(**{**facts, **more})


def attempt(job: str, number: int, slices: list[str], begin: float, end: float, **more) -> Attempt:
    facts = {
        "id": attempt_id(JobId(job), number), "job_id": JobId(job), "number": number,
        "slices": tuple(map(SliceId, slices)), "created_at": at(begin), "running_at": at(begin),
        "state": AttemptState.ENDED, "ended_at": at(end), "end_reason": EndReason.FINISHED,
    }  # fmt: skip
    return Attempt(**{**facts, **more})


def job(name: str, owner: str = "mel") -> Job:
    spec = JobSpec(name=f"name of {name}", command=("x",), accelerator="v5litepod-4")
    return Job(id=JobId(name), spec=spec, owner=owner, submitted_at=START)


def rows(slices, attempts, *jobs_, now=100.0):
    known = {item.id: item for item in jobs_}
    return {row.job_id: row for row in costs.account(slices, known, attempts, at(now))}


def test_a_slice_is_billed_from_the_start_of_its_machines_until_release():
    held = tpu_slice("a", up_at=at(1), ready_at=at(1.5), lost_at=at(4), gone_at=at(5),
                     loss=LossReason.RELEASED, job_id=JobId("j"))  # fmt: skip
    row = rows([held], [attempt("j", 0, ["a"], 2, 4)], job("j"))["j"]
    assert (row.chip_hours, row.useful, row.badput) == (12.0, 8.0, {Badput.OTHER: 4.0})
    assert (row.owner, row.job_name) == ("mel", "name of j")


def test_a_slice_that_never_came_up_is_not_billed():
    refused = tpu_slice("a", lost_at=at(4), gone_at=at(4), loss=LossReason.REFUSED)
    assert rows([refused], []) == {}


def test_a_preempted_slice_is_billed_until_it_is_gone():
    doomed = tpu_slice("a", up_at=at(0), lost_at=at(1), gone_at=at(1.5), loss=LossReason.PREEMPTED)
    assert costs.paid_span(doomed, at(9)) == (at(0), at(1.5))


def test_work_after_the_last_checkpoint_of_a_lost_attempt_is_lost():
    held = tpu_slice("a", up_at=at(0), lost_at=at(2), gone_at=at(2), loss=LossReason.PREEMPTED,
                     job_id=JobId("j"))  # fmt: skip
    ended = attempt("j", 0, ["a"], 0, 2, end_reason=EndReason.PREEMPTED, start_step=100,
                    checkpoint_step=150, last_step=200)  # fmt: skip
    row = rows([held], [ended], job("j"))["j"]
    assert (row.useful, row.badput) == (4.0, {Badput.WASTED_PROGRESS: 4.0})


@pytest.mark.parametrize(
    ("facts", "share"),
    [
        pytest.param({"last_step": None}, 0.0, id="nothing was reported"),
        pytest.param({"last_step": 10, "checkpoint_step": None}, 1.0, id="no checkpoint at all"),
        pytest.param({"last_step": 10, "checkpoint_step": 10}, 0.0, id="saved at the notice"),
        pytest.param({"last_step": 5, "start_step": 5}, 0.0, id="no step was made"),
        pytest.param({"last_step": 3, "start_step": 5}, 0.0, id="steps that go backwards"),
    ],
)
def test_the_lost_fraction_of_an_attempt(facts, share):
    ended = attempt("j", 0, ["a"], 0, 1, **{"end_reason": EndReason.PREEMPTED, **facts})
    assert goodput.lost_share(ended) == share


LIVE = {"state": AttemptState.RUNNING, "ended_at": None, "end_reason": None}


@pytest.mark.parametrize(
    ("facts", "reporting", "useful"),
    [
        pytest.param({"end_reason": EndReason.FINISHED}, (), True, id="finished"),
        pytest.param({"end_reason": EndReason.PREEMPTED}, (), False, id="lost, no steps"),
        pytest.param({"end_reason": EndReason.USER_ERROR}, (), False, id="failed, no steps"),
        pytest.param(
            {"end_reason": EndReason.PREEMPTED, "last_step": 9, "checkpoint_step": 9}, (), True,
            id="lost, all steps saved",
        ),
        pytest.param(LIVE, (), False, id="running, no steps"),
        pytest.param(LIVE, ("j.0",), True, id="running, with steps"),
    ],
)  # fmt: skip
def test_work_without_reported_steps_is_unknown_unless_it_finished(facts, reporting, useful):
    held = tpu_slice("a", up_at=at(0), gone_at=at(2), job_id=JobId("j"))
    ran = attempt("j", 0, ["a"], 0, 2, **facts)
    [row] = costs.account([held], {JobId("j"): job("j")}, [ran], at(2), reporting)
    assert (row.useful, row.badput) == ((8.0, {}) if useful else (0.0, {Badput.UNKNOWN: 8.0}))


def test_time_on_a_pool_slice_is_split_by_job_and_the_rest_has_no_job():
    held = tpu_slice("a", up_at=at(0), pool="lab")
    ended = [attempt("j", 0, ["a"], 1, 2), attempt("k", 0, ["a"], 3, 6)]
    by_job = rows([held], ended, job("j"), job("k", "mo"), now=10)
    assert {name: row.chip_hours for name, row in by_job.items()} == {
        "j": 4.0, "k": 12.0, None: 24.0,
    }  # fmt: skip
    assert sum(row.chip_hours for row in by_job.values()) == 4 * 10


@pytest.mark.parametrize("others", [True, False], ids=["of all jobs", "of this job"])
def test_a_job_does_not_pay_for_what_a_slice_of_a_pool_did_before(others):
    """The hold of 3 hours by j, and the hours in which nobody had it."""
    held = tpu_slice("a", up_at=at(0), pool="lab", job_id=JobId("k"), assigned_at=at(6))
    live = attempt(
        "k", 0, ["a"], 7, 9,
        ended_at=None, end_reason=None, state=AttemptState.RUNNING,
    )  # fmt: skip
    known = [attempt("j", 0, ["a"], 1, 4), live] if others else [live]
    by_job = rows([held], known, job("j"), job("k", "mo"), now=10)
    assert by_job["k"].chip_hours == 4 * 4.0
    assert sum(row.chip_hours for row in by_job.values()) == 4 * 10


def test_the_total_over_jobs_equals_the_total_over_slices():
    slices = [
        tpu_slice(f"s{index}", up_at=at(index), gone_at=at(index + 3), job_id=JobId("j"))
        for index in range(5)
    ]
    attempts = [attempt("j", index, [f"s{index}"], index + 1, index + 9) for index in range(5)]
    by_job = rows(slices, attempts, job("j"))
    assert sum(row.chip_hours for row in by_job.values()) == pytest.approx(5 * 3 * 4)


def test_stock_rows_count_grants_and_refusals_by_source():
    slices = [
        tpu_slice("a", up_at=at(1), loss=LossReason.PREEMPTED, state=SliceState.GONE),
        tpu_slice("b", up_at=at(2)),
        tpu_slice("c", loss=LossReason.REFUSED, zone="y", state=SliceState.GONE),
    ]
    refusal = CapacityRefusal(
        provider="tpu-vm", zone="y", accelerator="v5litepod-4", capacity=Capacity.SPOT,
        message="none left", refused_at=at(3), until=at(4),
    )  # fmt: skip
    in_y, in_z = costs.stock(slices, [refusal])
    assert (in_y.granted, in_y.refused, in_y.not_before, in_y.message) == (0, 1, at(4), "none left")
    assert (in_z.granted, in_z.preempted, in_z.last_granted) == (2, 1, at(2))


def test_prices_from_the_config_take_precedence_and_are_marked():
    table = prices.price_table({"v5e": {"spot": 0.5}})
    assert prices.chip_hour_price("v5litepod-16", "spot", table) == 0.5
    assert table["v5e", "spot"].source == "config"
    assert prices.chip_hour_price("v5litepod-16", "on-demand", table) == 1.2
    assert all(price.as_of and price.source for price in prices.price_table().values())


def test_a_price_of_each_generation_is_known():
    """So `--max-cost` has an effect for all types."""
    generations, kinds = {row[0] for row in tpu_types.GENERATIONS}, list(Capacity)
    assert set(prices.price_table()) == set(product(generations, kinds))
    assert prices.chip_hour_price("tpu7x-8", "on-demand", prices.price_table()) == 12.0
    assert prices.chip_hour_price("tpu7x-8", "queued", prices.price_table()) == 6.0, "flex-start"


def test_own_prices_say_when_they_held_and_where_they_are_from():
    own = {"as_of": "2026-11", "source": "contract", "tpu7x": {"on-demand": 9.0}}
    price = prices.price_table(own)["tpu7x", "on-demand"]
    assert (price.usd, price.as_of, price.source) == (9.0, "2026-11", "contract")
    with pytest.raises(BadInput, match="as_of"):
        prices.price_table({"as_of": "November"})


@pytest.mark.parametrize(
    "own", [{"v9": {"spot": 1}}, {"v5e": 1}, {"v5e": {"stolen": 1}}, {"v5e": {"spot": -1}},
            {"v5e": {"spot": "free"}}, {"v5e": {"spot": float("nan")}}]
)  # fmt: skip
def test_invalid_prices_are_rejected(own):
    with pytest.raises(BadInput, match="prices"):
        prices.price_table(own)


@given(
    cut=st.floats(0, 30),
    spans=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 10)), min_size=1, max_size=4),
    live=st.booleans(),
)
def test_what_was_billed_before_and_after_a_moment_is_all_that_was_billed(cut, spans, live):
    end = {} if live else {"lost_at": at(25), "gone_at": at(25), "loss": LossReason.RELEASED}
    held = [
        tpu_slice("own", up_at=at(0), job_id=JobId("j0"), assigned_at=at(0), **end),
        tpu_slice("pooled", up_at=at(0), pool="lab", **end),
    ]
    begin, attempts = 0.0, []
    for number, (wait, length) in enumerate(spans):
        begin += wait
        name = f"j{number % 2}"
        attempts.append(
            attempt(name, number, ["pooled"], begin, begin + length, last_step=4, checkpoint_step=1)
        )
        begin += length
    jobs = {each.id: each for each in (job("j0"), job("j1", owner="mo"))}
    billed = lambda **bounds: costs.account(held, jobs, attempts, at(30), **bounds)
    whole = costs.by_owner(billed())
    settled = costs.settle(SettledCosts(until=START), billed(until=at(cut)), at(cut))
    both = costs.settle(settled, billed(since=at(cut)), at(30)).rows
    assert settled.until == at(cut)
    assert [(row.owner, row.pool) for row in both] == [(row.owner, row.pool) for row in whole]
    for one, other in zip(both, whole, strict=True):
        assert one.chip_hours == pytest.approx(one.useful + sum(one.badput.values()))
        for figure in ("chip_hours", "useful", "badput"):
            assert getattr(one, figure) == pytest.approx(getattr(other, figure), abs=1e-6)
        assert one.job_id is None


def test_costs_of_simulated_and_real_slices_are_not_summed_together():
    rows = [
        replace(row, simulated=simulated)
        for simulated in (True, False)
        for row in costs.account(
            [tpu_slice("a", up_at=at(0), job_id=JobId("j"))], {JobId("j"): job("j")}, [], at(2)
        )
    ]
    assert [(row.simulated, row.chip_hours) for row in costs.by_owner(rows)] == [
        (False, 8.0),
        (True, 8.0),
    ]
