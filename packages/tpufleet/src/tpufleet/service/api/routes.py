"""All routes of the API. Dispatch, authentication, roles and the OpenAPI document follow them."""

from __future__ import annotations

from tpufleet.service.api import (
    agents,
    costs,
    events,
    job_files,
    jobs,
    notifications,
    pools,
    preferences,
    queue,
    reservations,
    server_info,
    sessions,
    slices,
    snapshots,
    users,
)
from tpufleet.service.transport.routing import Route

ROUTES: tuple[Route, ...] = (
    *agents.router.routes,  # first, because they are called most often
    *jobs.router.routes,
    *job_files.router.routes,
    *queue.router.routes,
    *events.router.routes,
    *slices.router.routes,
    *pools.router.routes,
    *reservations.router.routes,
    *costs.router.routes,
    *snapshots.router.routes,
    *users.router.routes,
    *preferences.router.routes,
    *notifications.router.routes,
    *server_info.router.routes,
    *sessions.router.routes,
)
