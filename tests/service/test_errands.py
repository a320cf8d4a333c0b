"""Errands: each host is asked once, answers once, and only for itself."""

from __future__ import annotations

import pytest

from tpufleet.errors import Conflict, NotFound
from tpufleet.model.errands import ErrandOrder, ErrandResult
from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId
from tpufleet.service.errands import REMEMBERED, Errands

HOSTS = (HostId("a/0"), HostId("a/1"))


def result(host: str, output: str = "") -> ErrandResult:
    return ErrandResult(host_id=HostId(host), status=0, output=output)


@pytest.fixture
def errands() -> Errands:
    made = Errands()
    made.send(ErrandOrder(id="e1", command=("date",)), SliceId("a"), HOSTS)
    return made


def test_a_host_is_asked_until_it_has_answered(errands):
    assert [errand.id for errand in errands.waiting_for(HOSTS[0])] == ["e1"]
    errands.answer("e1", result("a/0"))
    assert errands.waiting_for(HOSTS[0]) == ()
    assert [errand.command for errand in errands.waiting_for(HOSTS[1])] == [("date",)]
    assert errands.waiting_for(HostId("b/0")) == ()


def test_the_first_answer_of_a_host_counts(errands):
    errands.answer("e1", result("a/0", "first"))
    errands.answer("e1", result("a/0", "second"))
    assert errands.find("e1").results[HOSTS[0]].output == "first"


def test_sending_the_same_errand_twice_is_one_and_another_under_its_id_is_refused(errands):
    errands.send(ErrandOrder(id="e1", command=("date",)), SliceId("a"), HOSTS)
    assert len(errands.waiting_for(HOSTS[0])) == 1
    with pytest.raises(Conflict):
        errands.send(ErrandOrder(id="e1", command=("rm",)), SliceId("a"), HOSTS)


def test_a_host_cannot_answer_for_an_errand_that_it_was_not_given(errands):
    with pytest.raises(NotFound):
        errands.answer("e1", result("b/0"))
    with pytest.raises(NotFound):
        errands.answer("e2", result("a/0"))


def test_old_errands_are_forgotten(errands):
    for number in range(REMEMBERED):
        errands.send(ErrandOrder(id=f"n{number}", command=("x",)), SliceId("a"), HOSTS)
    with pytest.raises(NotFound, match="started anew"):
        errands.find("e1")
