"""Pools: named, bounded claims on capacity. And refusals of capacity."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from tpufleet.errors import BadInput, BadRequest, NoCapacity, Permanent, QuotaExceeded
from tpufleet.model.fleet.slices import TpuSlice
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.tpu.type_lookup import short_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    provider: str
    accelerator: str
    largest: int  # most slices at a time
    smallest: int = 0  # kept ready even when no job needs them
    zones: tuple[str, ...] = ()
    capacity: tuple[Capacity, ...] = (Capacity.SPOT,)
    members: tuple[str, ...] = ()  # users that may use it; empty: all
    slices_per_user: int | None = None
    supersede: bool = False  # a job of higher priority may take slices from a running one
    hold_after_failure: timedelta = timedelta(0)  # slices of a failed job stay for its owner
    idle_after: timedelta = timedelta(minutes=10)  # idle slices above `smallest` are released
    pod: PodSettings = field(default_factory=PodSettings)  # on Kubernetes

    def admits(self, user: str, *, is_admin: bool) -> bool:
        """Whether the jobs and reservations of this user may have its slices."""
        return is_admin or not self.members or user in self.members

    def excludes(self, user: str) -> str:
        """Why it does not admit this user."""
        return f"{user} is not a member of pool {self.name}; an admin can change its members"

    def mismatch(self, accelerator: str) -> str:
        """Why a job of another type cannot run in it."""
        has, needs = short_name(self.accelerator), short_name(accelerator)
        return f"pool {self.name} has {has} slices, but the job needs {needs}"

    def provides(self, tpu_slice: TpuSlice, settings: str = "") -> bool:
        """Whether it would request such a slice now. False for one from before a change.
        `settings`: the digest of those it would be requested with; empty: not known."""
        if (tpu_slice.provider, tpu_slice.accelerator) != (self.provider, self.accelerator):
            return False
        if tpu_slice.adopted:  # a person chose where it is
            return True
        if settings and tpu_slice.settings not in ("", settings):
            return False
        in_zone = not self.zones or tpu_slice.zone in self.zones
        return in_zone and tpu_slice.capacity in self.capacity


class RefusalKind(StrEnum):
    """What has to change before a source grants a request."""

    CAPACITY = "capacity"  # the zone has none left
    QUOTA = "quota"  # the project's quota is used up
    ACCESS = "access"  # credentials, a permission or an API that is disabled
    REQUEST = "request"  # the request itself
    UNREACHABLE = "unreachable"  # hosts run, but cannot reach our server


def refusal_kind(error: Exception) -> RefusalKind | None:
    """The kind of refusal that an error is; None: not a refusal, retry the same request."""
    match error:
        case NoCapacity():
            return RefusalKind.CAPACITY
        case QuotaExceeded():
            return RefusalKind.QUOTA
        case BadRequest() | BadInput():
            return RefusalKind.REQUEST
        case Permanent():
            return RefusalKind.ACCESS
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRefusal:
    """A provider refused this type from this source. Until it expires, neither this nor a larger
    size is requested there; without access, nothing is. If hosts cannot reach our server, nothing
    is requested from the whole provider."""

    provider: str
    zone: str
    accelerator: str
    capacity: Capacity
    message: str
    refused_at: datetime
    until: datetime  # no request before
    streak: int = 1  # consecutive refusals; 0: granted since
    kind: RefusalKind = RefusalKind.CAPACITY
    server_url: str = ""  # that hosts cannot reach
    detail: str = ""  # the provider's whole text, where the message is a summary
    late: bool = False  # the request was accepted, and failed later

    @property
    def key(self) -> str:
        if self.kind is RefusalKind.UNREACHABLE:
            return f"{self.provider}|{self.kind}"
        return f"{self.provider}|{self.zone}|{self.accelerator}|{self.capacity}"

    def holds(self, now: datetime) -> bool:
        """One from the future does not: the clock was set back, and its age is unknown."""
        return self.refused_at <= now < self.until
