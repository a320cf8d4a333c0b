"""Time for timers that are compared with times of the cluster."""

from __future__ import annotations

from datetime import datetime

from tpufleet.clocks import Clock

# After a step of the machine's clock: timers are off by no more than this share until it is
# caught up with.
CATCH_UP = 0.05


class SteadyClock:
    """The time of day without its steps, so that no timer ends early when the clock is set. For
    one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now, self._uptime = clock.now(), clock.uptime()

    def now(self) -> datetime:
        uptime = self._clock.uptime()
        passed, self._uptime = uptime - self._uptime, uptime
        self._now += passed
        behind = self._clock.now() - self._now
        self._now += max(-CATCH_UP * passed, min(behind, CATCH_UP * passed))
        return self._now
