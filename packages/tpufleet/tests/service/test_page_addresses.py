"""Addresses of the web page: none leads away."""

from __future__ import annotations

import pytest

from tests.service.harness import ServiceHarness


@pytest.mark.parametrize(
    "address",
    [
        "/login?next=https://evil.example/",
        "/login?next=//evil.example",
        "/?next=https://evil.example/",
        "/user//evil.example",
        "/user/%2F%2Fevil.example",
        "/user/ada%0d%0aLocation:%20https://evil.example",
        "/user/https:%2F%2Fevil.example",
        "/user/a&q=b",
        "//evil.example",
        "//evil.example/",
        "/%2F/evil.example/",
        "/\\evil.example/",
        "/api/v1/session?next=https://evil.example/",
        "/api/v1/jobs/",  # a framework may redirect it, to the host of the request
    ],
)
def test_no_address_leads_to_another_site(shared_service: ServiceHarness, address):
    with shared_service.http(shared_service.tokens["mel"]) as http:
        answer = http.get(shared_service.url + address, headers={"Host": "evil.example"})
    assert answer.headers.get("location", "/#/").startswith("/#/")
    assert "evil" not in answer.headers.get("location", "")
