"""How many examples a property test tries."""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"  # the profile of the default run, see conftest.py


def examples(count: int) -> int:
    """`count`; in the default run no more than its profile says."""
    quick = settings.get_profile(QUICK).max_examples
    return min(count, quick) if settings().max_examples == quick else count
