"""The OpenAPI document describes every route, and every reference in it leads somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport import app


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def test_the_document_holds_each_route_of_the_table_and_no_other(shared_service):
    document = shared_service.client("vic").openapi()
    assert document["openapi"] == "3.1.0"
    written = {(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs}
    assert written == {(route.method, "/api/v1" + route.path) for route in ROUTES}


def test_every_reference_resolves(shared_service):
    document = shared_service.client("vic").openapi()
    found = set(references(document))
    assert len(found) > 30
    for reference in found:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node


def test_every_operation_has_its_own_name_a_summary_and_a_guard(shared_service):
    document = shared_service.client("vic").openapi()
    operations = [each for verbs in document["paths"].values() for each in verbs.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    for each in operations:
        assert each["summary"]
        assert each["security"] in ([{"user": []}], [{"slice": []}])


def test_path_parameters_are_declared(shared_service):
    document = shared_service.client("vic").openapi()
    for path, verbs in document["paths"].items():
        named = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        for operation in verbs.values():
            declared = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert declared == named


def test_every_status_that_an_error_can_have_is_in_the_document(shared_service):
    paths = shared_service.client("vic").openapi()["paths"]
    possible = {str(status) for _, status in app._STATUS} | {"503"}
    for methods in paths.values():
        for operation in methods.values():
            assert possible <= set(operation["responses"]), operation["operationId"]
