"""Servers and users as for the tests of the command line."""

from tests.views.conftest import (  # noqa: F401  fixtures
    admin,
    alone,
    cloud,
    clouds,
    notifications,
    tpu,
    work,
    world,
)
