"""Bookmarks of the page of the former job manager."""

from __future__ import annotations

import pytest

from tests.service.harness import ServiceHarness


@pytest.mark.parametrize(
    ("address", "today"),
    [
        ("/user/ada", "/#/jobs?q=owner:ada"),
        ("/user/ada.b-c_d/", "/#/jobs?q=owner:ada.b-c_d"),
        ("/log/ada/3?n=100&ansi=1", "/#/jobs?q=owner:ada"),
        ("/tpus", "/#/inventory"),
        ("/login", "/#/jobs"),
        ("/logout", "/#/jobs"),
    ],
)
def test_a_bookmark_of_the_former_page_leads_to_todays(world: ServiceHarness, address, today):
    """The page holds no data: it asks for a login before it shows the jobs of a user."""
    with world.http() as http:
        answer = http.get(world.url + address)
        assert (answer.status_code, answer.headers["location"]) == (302, today)
        assert http.post(world.url + address).status_code != 302
