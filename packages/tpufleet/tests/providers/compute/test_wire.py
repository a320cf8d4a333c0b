"""Every request that the provider sends, compared with Google's client: methods, paths, names of
queries, fields of bodies, and values of enumerations."""

from __future__ import annotations

import importlib
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")

import proto

from tests.providers.compute.emulated_compute import ZONE, EmulatedCompute
from tests.providers.compute.person import Person
from tests.providers.orders import order
from tpufleet.errors import ProviderBusy
from tpufleet.model.fleet.cloud_slices import ExpectedSlice
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.compute.provider import ComputeProvider
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest
from tpufleet_testbed.compute_engine.fault_plan import (
    IMMEDIATE,
    ComputeCallFault,
    ReservedCapacity,
)

# Services of the client that the provider calls.
SERVICES = (
    "instance_group_managers", "instances", "region_instance_templates", "resource_policies",
    "zone_operations", "region_operations", "reservations", "future_reservations",
)  # fmt: skip
STANDARD_QUERIES = {"fields"}  # of every Google API
Call = tuple[str, str, dict[str, str], Any]  # method, path, query, body


class RecordingRest(GoogleRest):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.calls: list[Call] = []

    def _call(self, method: str, api: str, path: str, query: dict[str, Any], body: Any) -> Answer:
        if api == "compute":
            self.calls.append((method, f"/{path}", query, body))
        return super()._call(method, api, path, query, body)


class Method(typing.NamedTuple):
    """Of Google's client."""

    name: str
    http: str
    path: re.Pattern[str]
    body: str
    request: Any


def methods() -> Iterator[Method]:
    for service in SERVICES:
        camel = "".join(word.title() for word in service.split("_"))
        module = importlib.import_module(f"google.cloud.compute_v1.services.{service}")
        base = importlib.import_module(f"{module.__name__}.transports.rest_base")
        transport = getattr(base, f"_Base{camel}RestTransport")
        client = getattr(module, f"{camel}Client")
        for name, inner in vars(transport).items():
            if not name.startswith("_Base") or not hasattr(inner, "_get_http_options"):
                continue
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("_Base")).lower()
            function = getattr(client, f"{snake}_unary", None) or getattr(client, snake, None)
            if function is None:
                continue
            [request, *_] = [
                each
                for each in typing.get_args(typing.get_type_hints(function)["request"])
                if isinstance(each, type) and issubclass(each, proto.Message)
            ]
            for option in inner._get_http_options():
                pattern = re.sub(r"\{\w+\}", "[^/]+", option["uri"])
                yield Method(
                    f"{service}.{snake}", option["method"].upper(), re.compile(pattern),
                    option.get("body", ""), request,
                )  # fmt: skip


def camel_case(name: str) -> str:
    return re.sub(r"_+(\w)", lambda found: found[1].upper(), name)


def fields_of(message: type[proto.Message]) -> dict[str, Any]:
    return {camel_case(name).rstrip("_"): field for name, field in message.meta.fields.items()}


def check_body(value: Any, message: type[proto.Message], where: str) -> None:
    known = fields_of(message)
    for key, each in value.items():
        assert key in known, f"{where}.{key} is unknown to Google's client"
        field = known[key]
        inner = field.message
        if inner is not None and not inner.__name__.endswith("Entry"):  # of a mapping
            for item in each if isinstance(each, list) else [each]:
                check_body(item, inner, f"{where}.{key}")
        enumeration = getattr(message, key[0].upper() + key[1:], None)
        if isinstance(enumeration, proto.enums.ProtoEnumMeta):
            assert each in enumeration.__members__, f"{where}.{key}: {each}"
    message.from_json(json.dumps(value), ignore_unknown_fields=False)  # types of values


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Call]]:
    """Of slices of each capacity type, from the request to the end of what they shared."""
    folder: Path = tmp_path_factory.mktemp("wire")
    reserved = ReservedCapacity(name="ours", zone=ZONE, machine="ct5p-hightpu-4t", vms=16)
    faults = (
        ComputeCallFault(method="*.list", error="omitted", calls=(3,)),
        ComputeCallFault(method="instances.insert", error="stockout", calls=(1,), late=True),
    )
    latencies = replace(IMMEDIATE, operation=timedelta(seconds=3), stockout=timedelta(seconds=9))
    world = EmulatedCompute(folder, reservations=(reserved,), calls=faults, latencies=latencies)
    world.reopen(reservation="ours", tags=("tpu",), service_account="h@p.iam.gserviceaccount.com")
    world.provider.close()
    rest = RecordingRest(world.settings.endpoint)
    world.provider = ComputeProvider(
        world.settings, fleet="test", folder=world.folder, clock=world.clock, rest=rest,
        min_wait=900.0, monotonic=lambda: world.clock.now().timestamp(),
    )  # fmt: skip
    names = []
    for capacity in Capacity:
        for accelerator in ("v5p-8", "v5p-32"):
            names.append(f"{capacity}-{accelerator}".lower())
            wanted = order(names[-1], accelerator=accelerator, zone=ZONE, capacity=capacity)
            while True:
                try:
                    world.provider.request(wanted)
                    break
                except ProviderBusy:  # a policy or a template is being created
                    world.pass_time(2)
    expected = [ExpectedSlice(id=SliceId(name), zone=ZONE) for name in names]
    for _ in range(6):
        world.pass_time(30)
        world.provider.listing(expected)
    for name in names:
        world.provider.release(SliceId(name), ZONE)
    for _ in range(6):
        world.pass_time(300)
        world.provider.listing()
    assert world.left() == []
    adopt_and_give_back(world)
    world.close()
    yield rest.calls


def adopt_and_give_back(world: EmulatedCompute) -> None:
    person = Person(world.emulator, ZONE, settle=lambda: world.pass_time(5))
    person.make_group("mels", 4, topology="2x2x4")
    for _ in range(10):
        world.pass_time(5)
        world.provider.listing()
    adopted = SliceId("mels-a1b2c3")
    wanted = order(adopted, accelerator="v5p-32", zone=ZONE, node="mels", pool="lab")
    for step in (
        lambda: world.provider.request(wanted), lambda: world.provider.release(adopted, ZONE),
    ):  # fmt: skip
        while True:
            try:
                step()
                break
            except ProviderBusy:  # the metadata is being changed
                world.pass_time(5)


def test_each_request_is_one_that_googles_client_could_send(calls):
    known = list(methods())
    seen: set[str] = set()
    for http, path, query, body in calls:
        fitting = [each for each in known if each.http == http and each.path.fullmatch(path)]
        assert len(fitting) == 1, f"{http} {path}"
        [method] = fitting
        seen.add(method.name)
        fields = fields_of(method.request)
        assert set(query) <= {*fields, *STANDARD_QUERIES}, f"{method.name}: {query}"
        assert (body is not None) == bool(method.body), f"body of {method.name}"
        if method.body:
            resource = method.request.meta.fields[method.body].message
            check_body(body, resource, method.name)
    assert seen >= {
        "instance_group_managers.insert", "instance_group_managers.list",
        "instance_group_managers.get", "instance_group_managers.delete", "instances.insert",
        "instances.list", "instances.get", "instances.delete", "region_instance_templates.insert",
        "region_instance_templates.delete", "resource_policies.insert", "resource_policies.delete",
        "zone_operations.get", "region_operations.wait", "instances.set_metadata",
        "instances.set_labels", "instance_group_managers.list_managed_instances",
    }  # fmt: skip


def test_each_write_can_be_repeated_without_a_second_effect(calls):
    writes = [
        (path, query) for http, path, query, _ in calls
        if http == "DELETE" or "requestId" in query
    ]  # fmt: skip
    identities = [query["requestId"] for _, query in writes]
    assert len(writes) >= 16 and len(set(identities)) == len(identities)
    for http, path, query, _ in calls:
        if http == "POST" and not path.endswith(("/wait", "/listManagedInstances")):
            assert query.get("requestId"), path
