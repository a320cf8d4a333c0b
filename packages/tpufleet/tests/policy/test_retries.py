"""Retry decisions: rules, budgets by reason, the crash-loop guard, and backoff."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import after, ended_attempt, make_job
from tpufleet.model.job import job_file
from tpufleet.model.job.end_reasons import END_REASONS, EndReason, RetryBudget
from tpufleet.model.job.jobs import Capacity, Retries, Rule
from tpufleet.policy.recovery import retries, retry_rules
from tpufleet.policy.recovery.retries import RetryAction, RetryDecision
from tpufleet.policy.recovery.retry_rules import RuleAction

NEVER_RETRIED = {EndReason.DATA_ERROR, EndReason.TIMEOUT, EndReason.OUT_OF_HBM}
STOPPED_BY_A_LIMIT = {EndReason.OVER_BUDGET}
GENEROUS = Retries(failure=9, setup=9, memory=9, hang=9, infrastructure=9)
NOT_CRASHES = {
    EndReason.PREEMPTED, EndReason.MAINTENANCE, EndReason.SUPERSEDED, EndReason.HOST_LOST,
}  # fmt: skip


def decide(*reasons: EndReason, progress: bool = True, **options) -> RetryDecision:
    """The decision after attempts that ended so, each with or without a newer checkpoint."""
    history = [
        ended_attempt(number, reason, number * 10, number * 10 + (10 if progress else 0))
        for number, reason in enumerate(reasons)
    ]
    job = make_job(**{"retries": GENEROUS, **options})
    return retries.decide_retry(job, history[-1], history)


# rule: after a preemption, a lost connection, a busy device
RULES = {
    Rule.AUTO: (RetryAction.KEEP_SLICES, RetryAction.KEEP_SLICES, RetryAction.NEW_SLICES),
    Rule.PRE: (RetryAction.KEEP_SLICES, RetryAction.KEEP_SLICES, RetryAction.FAIL),
    Rule.PASS: (RetryAction.FAIL, RetryAction.FAIL, RetryAction.FAIL),
    Rule.REAPPLY: (RetryAction.KEEP_SLICES, RetryAction.NEW_SLICES, RetryAction.FAIL),
    Rule.RERUN: (RetryAction.KEEP_SLICES, RetryAction.KEEP_SLICES, RetryAction.FAIL),
    Rule.RESUME: (RetryAction.FAIL, RetryAction.KEEP_SLICES, RetryAction.FAIL),
}


@pytest.mark.parametrize("rule", Rule)
def test_the_rules_govern_three_reasons(rule):
    for reason, expected in zip(retry_rules.GOVERNED_REASONS, RULES[rule], strict=True):
        decision = decide(reason, rule=rule)
        assert decision.action is expected, reason
        assert decision.from_scratch == (rule is Rule.RERUN and reason is EndReason.CONNECTION_LOST)
        if expected is RetryAction.FAIL:
            assert f"not retried under rule `{rule}`" in decision.reason


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    "reason", [reason for reason in EndReason if reason not in retry_rules.GOVERNED_REASONS]
)
def test_no_rule_affects_any_other_reason(rule, reason):
    assert retry_rules.rule_action(rule, reason) is None
    assert decide(reason, rule=rule) == decide(reason, rule=Rule.PRE)


def test_a_preempted_slice_is_replaced_and_its_healthy_siblings_are_kept():
    assert retry_rules.rule_action(Rule.PRE, EndReason.PREEMPTED) is RuleAction.REAPPLY
    assert decide(EndReason.PREEMPTED).action is RetryAction.KEEP_SLICES


INFRASTRUCTURE = [
    reason
    for reason, info in END_REASONS.items()
    if info.budget in (RetryBudget.FREE, RetryBudget.INFRASTRUCTURE)
]


@pytest.mark.parametrize("reason", INFRASTRUCTURE)
@pytest.mark.parametrize("capacity", Capacity)
def test_by_default_infrastructure_failures_are_retried_on_every_capacity_type(capacity, reason):
    document = {"command": ["train"], "accelerator": "v4-8", "capacity": capacity.value}
    job = replace(make_job(), spec=job_file.parse_job(document))
    ended = ended_attempt(0, reason, None, 10)
    assert retries.decide_retry(job, ended, [ended]).will_retry


@pytest.mark.parametrize("reason", EndReason)
def test_the_decision_for_each_reason(reason):
    decision = decide(reason)
    if reason is EndReason.FINISHED:
        assert decision.action is RetryAction.SUCCEED
    elif reason is EndReason.CANCELLED:
        assert decision.action is RetryAction.CANCEL
    elif reason in STOPPED_BY_A_LIMIT:
        assert decision.action is RetryAction.FAIL and decision.advice
    elif reason in NEVER_RETRIED:
        assert decision.action is RetryAction.FAIL
        assert "a retry would fail the same way" in decision.reason and decision.advice
    elif reason in (EndReason.DISK_FULL, EndReason.DEVICE_BUSY):
        assert decision.action is RetryAction.NEW_SLICES
    else:
        assert decision.action is RetryAction.KEEP_SLICES
        assert END_REASONS[reason].description in decision.reason
    assert decision.reason


CHARGED = [
    reason
    for reason in EndReason
    if END_REASONS[reason].budget not in (RetryBudget.NONE, RetryBudget.FREE)
]


@pytest.mark.parametrize("reason", CHARGED)
@pytest.mark.parametrize("allowed", [0, 1, 4])
def test_a_budget_allows_exactly_its_number_of_retries(reason, allowed):
    budget = END_REASONS[reason].budget
    budgets_left = Retries(**{budget.value: allowed})
    for failures in range(1, allowed + 1):
        assert decide(*[reason] * failures, retries=budgets_left).will_retry
    last = decide(*[reason] * (allowed + 1), retries=budgets_left)
    assert last.action is RetryAction.FAIL
    assert f"retries.{budget} is {allowed}" in last.reason
    assert ("all used" in last.reason) is (allowed > 0)


def test_budgets_are_counted_separately():
    budgets_left = Retries(failure=1, setup=1, memory=1, hang=1, infrastructure=1)
    one_of_each = [
        EndReason.USER_ERROR, EndReason.SETUP_FAILED, EndReason.OUT_OF_HOST_MEMORY, EndReason.HUNG,
        EndReason.HOST_LOST,
    ]  # fmt: skip
    assert decide(*one_of_each, retries=budgets_left).will_retry
    assert not decide(*one_of_each, EndReason.USER_ERROR, retries=budgets_left).will_retry


def test_reasons_that_share_a_budget_use_it_up_together():
    budgets_left = Retries(infrastructure=2)
    reasons = [EndReason.HOST_LOST, EndReason.CONNECTION_LOST, EndReason.DISK_FULL]
    assert decide(*reasons[:2], retries=budgets_left).will_retry
    assert not decide(*reasons, retries=budgets_left).will_retry


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_attempts_that_leave_no_newer_checkpoint_are_a_crash_loop(limit):
    reasons = [EndReason.CONNECTION_LOST] * limit
    if limit > 1:
        assert decide(*reasons[1:], progress=False, crash_loop=limit).will_retry
    stuck = decide(*reasons, progress=False, crash_loop=limit)
    assert stuck.action is RetryAction.FAIL
    assert f"crash loop: {limit} consecutive attempts" in stuck.reason
    assert decide(*reasons, progress=True, crash_loop=limit).will_retry


@pytest.mark.parametrize(("minutes", "retried"), [(1, False), (10, True)], ids=["early", "late"])
def test_without_any_visible_checkpoint_only_early_failures_are_a_crash_loop(minutes, retried):
    """The checkpoints may be where the agent cannot see them."""
    ended = after(60 * minutes)
    history = [
        replace(ended_attempt(number, EndReason.CONNECTION_LOST, None, None),
                running_at=after(0), ended_at=ended)
        for number in range(4)
    ]  # fmt: skip
    job = make_job(retries=GENEROUS, crash_loop=3)
    assert retries.decide_retry(job, history[-1], history).will_retry is retried


@pytest.mark.parametrize("reason", sorted(NOT_CRASHES))
def test_lost_hardware_is_not_a_crash(reason):
    assert decide(*[reason] * 9, progress=False, crash_loop=3).will_retry


def test_progress_long_ago_does_not_hide_a_crash_loop_nor_a_preemption_in_between():
    history = [
        ended_attempt(0, EndReason.HUNG, None, 100),
        ended_attempt(1, EndReason.HUNG, 100, 100),
        ended_attempt(2, EndReason.PREEMPTED, 100, 100),
        ended_attempt(3, EndReason.HUNG, 100, 100),
        ended_attempt(4, EndReason.HUNG, 100, None),
    ]
    job = make_job(retries=GENEROUS, crash_loop=3)
    assert retries.attempts_without_progress(history) == 3
    assert retries.decide_retry(job, history[3], history[:4]).will_retry
    assert not retries.decide_retry(job, history[4], history).will_retry


@pytest.mark.parametrize(
    ("start", "reached", "progress"),
    [(None, None, False), (None, 5, True), (5, 5, False), (5, 6, True), (5, 4, False)],
)
def test_progress_is_a_checkpoint_newer_than_the_one_it_started_from(start, reached, progress):
    attempt = ended_attempt(0, EndReason.HUNG, start, reached)
    assert retries.made_progress(attempt) is progress


@pytest.mark.parametrize("reason", sorted(NOT_CRASHES))
def test_lost_hardware_is_replaced_without_delay(reason):
    assert decide(reason).delay == timedelta(0)


def test_the_delay_doubles_without_progress_and_restarts_after_progress():
    waits = [
        decide(*[EndReason.HUNG] * count, progress=False, crash_loop=99).delay
        for count in range(1, 10)
    ]
    assert waits.pop(0) == timedelta(0), "most often a failure does not come again"
    for count, wait in enumerate(waits, 1):
        middle = min(retries.RETRY_BACKOFF.first * 2**count, retries.RETRY_BACKOFF.longest)
        assert 0.8 * middle <= wait <= 1.2 * middle
    assert decide(*[EndReason.HUNG] * 9, crash_loop=99).delay == timedelta(0)


def test_an_attempt_that_never_ran_is_retried_after_a_delay():
    ended = replace(ended_attempt(0, EndReason.SETUP_FAILED), running_at=None)
    assert retries.decide_retry(make_job(retries=GENEROUS), ended, [ended]).delay > timedelta(0)


def test_jobs_that_fail_together_are_retried_at_different_times():
    waits = {
        retries.decide_retry(
            make_job(f"job-{number}", retries=GENEROUS),
            attempt := ended_attempt(1, EndReason.HUNG, job_id=f"job-{number}"),
            [attempt, attempt],
        ).delay
        for number in range(50)
    }
    assert len(waits) > 45


# Random histories: while the decision is to retry, another attempt follows.
budgets = st.builds(Retries, **{name: st.integers(0, 5) for name in (
    "failure", "setup", "memory", "hang", "infrastructure",
)})  # fmt: skip
endings = st.tuples(st.sampled_from(list(EndReason)), st.booleans())


def simulate(job, reasons):
    """The history of a job until it ends, from what would happen in each attempt."""
    history, step = [], None
    for number, (reason, progressed) in enumerate(reasons):
        reached = (step or 0) + 10 if progressed else step
        history.append(ended_attempt(number, reason, step, reached))
        step = reached
        decision = retries.decide_retry(job, history[-1], history)
        if not decision.will_retry:
            return history, decision
    return history, None


@given(st.lists(endings, max_size=30), budgets, st.sampled_from(list(Rule)))
def test_retries_never_exceed_a_budget(reasons, limits, rule):
    job = make_job(retries=limits, rule=rule, crash_loop=99)
    history, last = simulate(job, reasons)
    for budget in set(RetryBudget) - {RetryBudget.NONE, RetryBudget.FREE}:
        allowed = limits.limit(budget)
        assert retries.charged_attempts(history, budget) <= allowed + (last is not None)
        if last is None:
            assert retries.charged_attempts(history, budget) <= allowed


@given(st.lists(st.sampled_from(CHARGED), max_size=12), st.data(), budgets)
def test_free_reasons_never_use_up_a_retry(reasons, data, limits):
    """However many preemptions come in between, the same failures are tried again as without."""
    job = make_job(retries=limits, rule=Rule.PRE, crash_loop=99)
    free = st.sampled_from([EndReason.PREEMPTED, EndReason.MAINTENANCE, EndReason.SUPERSEDED])
    mixed = []
    for reason in reasons:
        mixed += [(item, False) for item in data.draw(st.lists(free, max_size=3))]
        mixed.append((reason, True))
    plain, plain_end = simulate(job, [(reason, True) for reason in reasons])
    history, end = simulate(job, mixed)
    charged = [
        item for item in history if END_REASONS[item.end_reason].budget is not RetryBudget.FREE
    ]
    assert [item.end_reason for item in charged] == [item.end_reason for item in plain]
    assert (end is None) == (plain_end is None)


@given(st.lists(st.sampled_from(CHARGED), max_size=20), st.integers(1, 4))
def test_a_job_that_makes_progress_is_never_a_crash_loop(reasons, limit):
    lavish = Retries(failure=99, setup=99, memory=99, hang=99, infrastructure=99)
    job = make_job(retries=lavish, crash_loop=limit)
    history, end = simulate(job, [(reason, True) for reason in reasons])
    assert end is None and len(history) == len(reasons)


@given(st.lists(st.sampled_from(CHARGED), min_size=60, max_size=60), budgets, st.integers(1, 9))
def test_without_progress_the_retries_end(reasons, limits, limit):
    job = make_job(retries=limits, crash_loop=limit)
    history, end = simulate(job, [(reason, False) for reason in reasons])
    total = sum(limits.limit(RetryBudget(name)) for name in Retries.__struct_fields__)
    lost_hosts = sum(item.end_reason is EndReason.HOST_LOST for item in history)
    assert end is not None and end.action is RetryAction.FAIL
    assert len(history) <= total + 1
    assert len(history) - lost_hosts <= limit


@given(st.lists(endings, min_size=1, max_size=12), budgets)
def test_every_decision_has_a_reason_and_only_a_failure_has_advice(reasons, limits):
    _, end = simulate(make_job(retries=limits), reasons)
    if end is not None:
        assert end.reason
        assert not end.advice or end.action is RetryAction.FAIL
        assert end.delay == timedelta(0) and not end.from_scratch
