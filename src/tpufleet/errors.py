"""Errors that answer two questions: would trying again help, and what should the reader do?

`Temporary` and `Permanent` answer the first; the message answers the second.
"""

from __future__ import annotations


class FleetError(Exception):
    """Base of every error that tpufleet raises on purpose."""


class Temporary:
    """Trying again later may work."""


class Permanent:
    """Trying again will fail the same way; something must change first."""


class BadInput(FleetError, Permanent):
    """What was given is not valid. The message names the field, the fault and the nearest cure."""


class NotFound(FleetError, Permanent):
    """There is no such thing. The message says what exists."""


class Conflict(FleetError, Permanent):
    """The request contradicts what is already recorded."""


class Forbidden(FleetError, Permanent):
    """The caller is known, but may not do this."""


class Unauthorized(FleetError, Permanent):
    """The caller is not known: no token, or a wrong one."""


class Fenced(FleetError, Permanent):
    """Another controller holds the lease now; this one must stop acting."""


class Unreachable(FleetError, Temporary):
    """The control plane does not answer."""


class ProviderError(FleetError):
    """A source of slices said no."""


class NoCapacity(ProviderError, Temporary):
    """The zone has no free slice of this type. Wait, or allow another zone."""


class QuotaExceeded(ProviderError, Temporary):
    """The project's quota in this zone is used up. Wait, allow another zone, or raise the quota."""


class RateLimited(ProviderError, Temporary):
    """Too many calls. Slow down and ask again."""


class ProviderUnavailable(ProviderError, Temporary):
    """The provider failed in a way that usually passes."""


class ProviderBusy(ProviderError, Temporary):
    """The thing is in the middle of another change, or stands in the way. Ask again."""


class PermissionMissing(ProviderError, Permanent):
    """The credentials may not do this. Grant the role that the message names."""


class BadRequest(ProviderError, Permanent):
    """The provider will never accept this request. Change the job or the pool."""
