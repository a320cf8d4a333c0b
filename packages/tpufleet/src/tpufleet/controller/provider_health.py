"""What each provider answered last, reported to the store for `tpu status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import tpufleet
from tpufleet.controller.provider_calls import CallKind, CallResult
from tpufleet.errors import BadInput, BadRequest, NoCapacity
from tpufleet.model.fleet.cloud_slices import SliceListing
from tpufleet.model.fleet.pools import CapacityRefusal
from tpufleet.model.fleet.server_status import (
    CONTACT,
    ControllerReport,
    ProviderHealth,
    ProviderProblem,
)
from tpufleet.model.values.records import replace

REPORT_INTERVAL = timedelta(seconds=15)
# A request may not be repeated after it failed, when its job was cancelled.
FORGET_AFTER = timedelta(minutes=10)


class ProviderHealthLog:
    def __init__(
        self,
        zones_by_provider: Mapping[str, Sequence[str]],
        holder: str,
        now: datetime,
        default_providers: Sequence[str] = (),
        server_url: str = "",
        slices_per_user: int | None = None,
    ) -> None:
        self._server_url = server_url
        self._slices_per_user = slices_per_user
        self._zones = {name: tuple(zones) for name, zones in zones_by_provider.items()}
        self._default_providers = tuple(default_providers)
        self._answered_at: dict[str, datetime | None] = dict.fromkeys(self._zones)
        self._problems: dict[tuple[str, str, str | None], ProviderProblem] = {}
        self._unreachable: list[CapacityRefusal] = []
        self._holder = holder
        self._leader_since = now
        self._reported_at: datetime | None = None
        self._changed = True

    def record(self, result: CallResult, zone: str | None, now: datetime) -> None:
        """`zone` is None for a call that concerns all zones."""
        if result.call is CallKind.FAULT:
            return
        error = result.error
        if error is None or isinstance(error, (NoCapacity, BadRequest, BadInput)):
            # The first answer of a provider is reported at once.
            self._changed |= self._answered_at.get(result.provider) is None
            self._answered_at[result.provider] = now
            self._clear(result.provider, result.call, zone)
        else:
            self._add(result.provider, result.call, zone, str(error), now)
        if result.call is CallKind.LISTING and isinstance(result.listing, SliceListing):
            errors = result.listing.zone_errors
            for provider, call, failed_zone in list(self._problems):
                same_call = provider == result.provider and call == result.call
                if same_call and failed_zone and failed_zone not in errors:
                    self._clear(provider, result.call, failed_zone)
            for failed_zone, message in errors.items():
                self._add(result.provider, result.call, failed_zone, message, now)

    def due_report(
        self, now: datetime, unreachable: Sequence[CapacityRefusal] = ()
    ) -> ControllerReport | None:
        """The report, if it changed or the last one is old. `unreachable`: of providers whose hosts
        cannot reach this server."""
        if list(unreachable) != self._unreachable:
            self._unreachable, self._changed = list(unreachable), True
        for key, problem in list(self._problems.items()):
            if now - problem.last_at > FORGET_AFTER:
                del self._problems[key]
                self._changed = True
        fresh = self._reported_at is not None and now - self._reported_at < REPORT_INTERVAL
        if fresh and not self._changed:
            return None
        self._changed, self._reported_at = False, now
        return ControllerReport(
            holder=self._holder,
            leader_since=self._leader_since,
            reported_at=now,
            version=tpufleet.__version__,
            server_url=self._server_url,
            slices_per_user=self._slices_per_user,
            providers=tuple(
                ProviderHealth(
                    name=name,
                    answered_at=answered_at,
                    zones=self._zones.get(name, ()),
                    default=name in self._default_providers,
                    problems=(
                        *(
                            _contact_problem(each)
                            for each in self._unreachable
                            if each.provider == name
                        ),
                        *(problem for key, problem in self._problems.items() if key[0] == name),
                    ),
                )
                for name, answered_at in self._answered_at.items()
            ),
        )

    def _add(
        self, provider: str, call: CallKind, zone: str | None, message: str, now: datetime
    ) -> None:
        key = (provider, call.value, zone)
        known = self._problems.get(key)
        if known is None:
            self._changed = True
            self._problems[key] = ProviderProblem(
                call=call.value, zone=zone, message=message, since=now, last_at=now
            )
        else:
            self._problems[key] = replace(
                known, message=message, last_at=now, count=known.count + 1
            )

    def _clear(self, provider: str, call: CallKind, zone: str | None) -> None:
        if self._problems.pop((provider, call.value, zone), None) is not None:
            self._changed = True


def _contact_problem(refusal: CapacityRefusal) -> ProviderProblem:
    return ProviderProblem(
        call=CONTACT,
        message=refusal.message,
        since=refusal.refused_at,
        last_at=refusal.refused_at,
        count=refusal.streak,
        retry_at=refusal.until,
    )
