"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long one example takes says more about who else uses the machine than about the code.
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The same examples each time: a new failure is the change's, not the dice's.
    derandomize=True,
)
settings.load_profile("shared machine")
