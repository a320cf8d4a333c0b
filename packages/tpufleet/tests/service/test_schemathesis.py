"""Requests that Schemathesis derives from the OpenAPI document, valid and invalid ones: no response
is a server error, and each has a status, a type and a form that the document promises.

A few for each operation by default; `./test -m scale PATH` sends 20,000.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tests.service.harness import USERS, ServiceHarness
from tests.service.test_openapi_fuzz import STREAMS, fill
from tpufleet.stores.open_store import open_store

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra `test`")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.core.failures import FailureGroup  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Conversation:
    """Statuses of all responses, and what was wrong with some of them."""

    def __init__(self, service: ServiceHarness, per_operation: int) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self.failures: dict[str, str] = {}
        self._service = service
        self._per_operation = per_operation

    def run(self) -> None:
        with self._service.http(self._service.tokens["ada"]) as http:
            document = http.get("/openapi.json").json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=self._service.url)
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.definition.raw["operationId"] not in STREAMS:  # they do not end
                self._run_operation(operation)

    def _run_operation(self, operation: Any) -> None:
        @settings(
            max_examples=self._per_operation,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def send_one(case: Any) -> None:
            self._send(operation.definition.raw, case)

        send_one()

    def _send(self, operation: dict[str, Any], case: Any) -> None:
        (scheme,) = operation["security"][0]
        service = self._service
        token = service.tokens["ada"] if scheme == "user" else service.slice_token("s1")
        response = case.call(headers={"Authorization": f"Bearer {token}"}, timeout=900)
        self.statuses[response.status_code] += 1
        if response.status_code == 401 and scheme == "user":
            service.add_user("ada", USERS["ada"])  # deleted, or its token revoked
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                key = f"{operation['operationId']}: {response.status_code} {failure.title}"
                example = f"{failure.message}\n{case.as_curl_command()[:1500]}"
                self.failures.setdefault(key, example)

    def report(self) -> str:
        return "\n\n".join(f"{key}\n{text}" for key, text in sorted(self.failures.items()))


def test_requests_derived_from_the_document_get_the_responses_that_it_promises(service):
    fill(service)
    conversation = Conversation(service, per_operation=3)
    conversation.run()
    assert not conversation.failures, conversation.report()
    # Otherwise the requests are too strange to find much.
    assert conversation.statuses[200] > 10, conversation.statuses


@pytest.mark.scale
@pytest.mark.timeout(3600)
def test_20000_requests_get_the_responses_that_the_document_promises(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/fleet.db")
    service = ServiceHarness(store, tmp_path / "state")
    service.start()
    try:
        fill(service)
        conversation = Conversation(service, per_operation=300)
        conversation.run()
        statuses = conversation.statuses
        print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
        assert not conversation.failures, conversation.report()
        assert sum(statuses.values()) >= 20_000
    finally:
        service.close()
        store.close()
