"""Node selectors, node affinity and tolerations mean what they mean to the scheduler."""

from __future__ import annotations

import pytest

from tests.provisioner import builders
from tests.provisioner.builders import settings
from tpufleet.errors import BadInput
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity
from tpufleet_gke.provisioner.model.scheduling import Node, Taint, misfit

A, B = "us-central1-a", "us-central1-b"
SPOT = Taint(label_keys.SPOT, "true")
NODE = Node({"team": "blue", "size": "4"})


def rule(key, operator, *values):
    return {"key": key, "operator": operator, "values": list(values)}


def affinity(*terms, **fields):
    """Each term is a list of rules."""
    required = [{"matchExpressions": list(term)} for term in terms]
    required += [{"matchFields": value} for value in fields.values()]
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": required}
        }
    }


def toleration(operator="", value="", key=label_keys.SPOT, effect=""):
    return {"key": key, "operator": operator, "value": value, "effect": effect}


RULES = {
    "In": (rule("team", "In", "red", "blue"), True),
    "In, another": (rule("team", "In", "red"), False),
    "In, absent": (rule("rack", "In", "1"), False),
    "NotIn": (rule("team", "NotIn", "red"), True),
    "NotIn, this one": (rule("team", "NotIn", "blue"), False),
    "NotIn, absent": (rule("rack", "NotIn", "1"), True),
    "Exists": (rule("team", "Exists"), True),
    "Exists, absent": (rule("rack", "Exists"), False),
    "DoesNotExist": (rule("rack", "DoesNotExist"), True),
    "DoesNotExist, present": (rule("team", "DoesNotExist"), False),
    "Gt": (rule("size", "Gt", "3"), True),
    "Gt, equal": (rule("size", "Gt", "4"), False),
    "Lt": (rule("size", "Lt", "5"), True),
    "Lt, no number": (rule("team", "Lt", "5"), False),
    "Lt, absent": (rule("rack", "Lt", "5"), False),
    "an operator of later versions": (rule("team", "Resembles", "blue"), False),
}


@pytest.mark.parametrize(("one", "fits"), RULES.values(), ids=RULES)
def test_an_expression_of_node_affinity(one, fits):
    assert (misfit({"affinity": affinity([one])}, NODE) == "") is fits


HOLDS, FAILS = rule("team", "Exists"), rule("team", "NotIn", "blue")
TERMS = {
    "all expressions of a term": (affinity([HOLDS, FAILS]), False),
    "one term of several": (affinity([FAILS], [HOLDS]), True),
    "no term of several": (affinity([FAILS], [FAILS]), False),
    "an empty term": (affinity([]), False),
    "no term": (affinity(), False),
    "not the name of a node": (affinity(x=[rule("metadata.name", "NotIn", "bad")]), True),
    "the name of a node": (affinity(x=[rule("metadata.name", "In", "good")]), False),
    "another field": (affinity(x=[rule("spec.cpu", "NotIn", "x")]), False),
    "preferences": ({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}, 1),
}


@pytest.mark.parametrize(("required", "fits"), TERMS.values(), ids=TERMS)
def test_terms_are_alternatives_and_their_rules_are_not(required, fits):
    assert (misfit({"affinity": required}, NODE) == "") is bool(fits)


TOLERATIONS = {
    "its value": (toleration("Equal", "true"), True),
    "equal by default": (toleration(value="true"), True),
    "another value": (toleration("Equal", "false"), False),
    "no value": (toleration(), False),
    "any value": (toleration("Exists"), True),
    "any key": (toleration("Exists", key=""), True),
    "this effect": (toleration("Exists", effect="NoSchedule"), True),
    "another effect": (toleration("Exists", effect="NoExecute"), False),
    "an operator of later versions": (toleration("Gt", "1"), False),
}


@pytest.mark.parametrize(("one", "fits"), TOLERATIONS.values(), ids=TOLERATIONS)
def test_a_toleration_of_the_spot_taint(one, fits):
    assert (misfit({"tolerations": [one]}, Node({}, (SPOT,))) == "") is fits


def locations(pod_options, **overrides):
    spec = builders.pool_spec(settings(zones=(A, B), **overrides), **pod_options)
    return [(one.zone, one.capacity) for one in spec.locations]


ON_DEMAND = PoolCapacity.ON_DEMAND
SPOT_NODES = rule(label_keys.SPOT, "In", "true")
BOUGHT = {
    "a zone": (affinity([rule(label_keys.ZONE, "In", B)]), [(B, ON_DEMAND)]),
    "not a zone": (affinity([rule(label_keys.ZONE, "NotIn", A)]), [(B, ON_DEMAND)]),
    "any zone": (affinity([rule(label_keys.ZONE, "Exists")]), [(A, ON_DEMAND), (B, ON_DEMAND)]),
    "zones by term": (
        affinity([rule(label_keys.ZONE, "In", B)], [rule(label_keys.ZONE, "In", "x")]),
        [(B, ON_DEMAND)],
    ),
    "an alternative to a zone": (
        affinity([rule(label_keys.ZONE, "In", "x")], [rule("team", "In", "blue")]),
        [(A, ON_DEMAND), (B, ON_DEMAND)],
    ),
    "not bad nodes": (
        affinity([rule("kubernetes.io/hostname", "NotIn", "bad")]),
        [(A, ON_DEMAND), (B, ON_DEMAND)],
    ),
}


@pytest.mark.parametrize(("required", "expected"), BOUGHT.values(), ids=BOUGHT)
def test_pools_are_bought_where_the_pod_would_run(required, expected):
    assert locations({"affinity": required}) == expected


def test_an_own_label_with_several_values_gets_one_of_them():
    spec = builders.pool_spec(affinity=affinity([rule("team", "In", "red", "blue")]))
    assert spec.create_request(spec.locations[0])["config"]["labels"]["team"] == "red"


UNFIT = {
    "no zone": ({"affinity": affinity([rule(label_keys.ZONE, "DoesNotExist")])}, "DoesNotExist"),
    "no allowed zone": ({"affinity": affinity([rule(label_keys.ZONE, "NotIn", A, B)])}, "NotIn"),
    "a label without a value": ({"affinity": affinity([rule("team", "Exists")])}, "team Exists"),
    "a node": ({"affinity": affinity(x=[rule("metadata.name", "In", "n")])}, "metadata.name"),
    "not spot, by the value": ({"node_selector": {label_keys.SPOT: "false"}}, "gke-spot=false"),
    "spot that is not tolerated": (
        {"node_selector": {label_keys.SPOT: "true"}, "tolerations": [toleration(value="false")]},
        "need the toleration",
    ),
    "another machine family": (
        {"node_selector": {label_keys.MACHINE_FAMILY: "n2"}}, "machine-family=n2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pod_options", "message"), UNFIT.values(), ids=UNFIT)
def test_no_pool_is_bought_that_the_pod_could_not_run_on(pod_options, message):
    with pytest.raises(BadInput, match=message):
        locations(pod_options)


def test_the_kind_of_capacity_may_be_in_a_term():
    pod = {"affinity": affinity([SPOT_NODES]), "tolerations": [toleration("Exists")]}
    assert locations(pod) == [(A, PoolCapacity.SPOT), (B, PoolCapacity.SPOT)]


def test_the_fallback_to_spot_is_for_pods_that_tolerate_its_very_taint():
    tolerating = {"tolerations": [toleration("Equal", "true")]}
    other = {"tolerations": [toleration("Equal", "false")]}
    both = [(A, ON_DEMAND), (B, ON_DEMAND), (A, PoolCapacity.SPOT), (B, PoolCapacity.SPOT)]
    assert locations(tolerating, spot_fallback=True) == both
    assert locations(other, spot_fallback=True) == both[:2]
