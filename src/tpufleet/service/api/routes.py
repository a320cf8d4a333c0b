"""Every route there is. Routing, authentication, roles and the OpenAPI document follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpufleet.model.api_types import (
    Acknowledgement,
    CleanReport,
    CleanRequest,
    CreatedToken,
    CurrentUser,
    EventPage,
    FaultRequest,
    JobDetail,
    JobExplanation,
    JobPage,
    JobRow,
    NewToken,
    NewUser,
    PoolPage,
    ResubmitRequest,
    SecretNames,
    SecretValue,
    SlicePage,
    SubmitRequest,
    TokenPage,
    UserPage,
)
from tpufleet.model.costs import CostReport, StockReport
from tpufleet.model.host_commands import HostCommandReport, HostCommandRequest
from tpufleet.model.pools import Pool
from tpufleet.model.users import Role, User
from tpufleet.service.api import costs, host_commands, jobs, users
from tpufleet.service.api.agents import AGENT_ROUTES
from tpufleet.service.routing import MediaType, Param, Route

SUBMIT_LIMIT = 64 * 1024 * 1024
ANY_SIZE = 2**50  # the handler has its own limit, with better advice

_VIEWER, _MEMBER, _ADMIN = Role.VIEWER, Role.MEMBER, Role.ADMIN
_LIMIT = Param("limit", "most rows to answer with", number=True)
_AFTER = Param("after", "number of the last event that is known", number=True)
_EVENTS = (_AFTER, _LIMIT, Param("newest", "anything: the last ones instead of the first"))
_LOGS = (
    Param("host", "number of the host in the gang; all hosts when missing", number=True),
    Param("attempt", "number of the attempt; the newest when missing", number=True),
    Param("tail", "only this many last lines of each host", number=True),
)
_JOBS = (
    Param("owner", "user name"),
    Param("state", "states, with commas between; `live` and `ended` stand for several"),
    Param("pool", "pool name"),
    Param("tag", "tag"),
    Param("name", "job name"),
    Param("parent", "id of the job that they came from"),
    Param("cleaned", "anything: those that were cleaned away instead"),
    _LIMIT,
    Param("before", "`next` of the page before"),
)


def _of(
    verb: str,
    path: str,
    role: Role,
    handler: Callable[..., Any],
    answer: Any,
    summary: str,
    **more: Any,
) -> Route:
    return Route(
        method=verb, path=path, role=role, handler=handler, response=answer, summary=summary, **more
    )


ROUTES: tuple[Route, ...] = (
    *AGENT_ROUTES,  # first, for they are called the most
    _of("GET", "/me", _VIEWER, jobs.get_me, CurrentUser, "Who you are"),
    _of(
        "POST",
        "/jobs",
        _MEMBER,
        jobs.submit_jobs,
        JobPage,
        "Submit jobs, all or nothing; sending one twice is one job",
        body=SubmitRequest,
        limit=SUBMIT_LIMIT,
    ),
    _of("GET", "/jobs", _VIEWER, jobs.list_jobs, JobPage, "Jobs, newest first", params=_JOBS),
    _of("GET", "/jobs/{ref}", _VIEWER, jobs.get_job, JobDetail, "One job by id, id prefix or name"),
    _of(
        "GET",
        "/jobs/{ref}/why",
        _VIEWER,
        jobs.explain_job,
        JobExplanation,
        "Why it waits, or why it ended",
    ),
    _of("POST", "/jobs/{ref}/cancel", _MEMBER, jobs.cancel_job, JobRow, "Stop it for good"),
    _of(
        "POST",
        "/jobs/{ref}/resume",
        _MEMBER,
        jobs.resume_job,
        JobRow,
        "A new job that goes on from the last checkpoint with the same code",
        body=ResubmitRequest,
    ),
    _of(
        "POST",
        "/jobs/{ref}/rerun",
        _MEMBER,
        jobs.rerun_job,
        JobRow,
        "A new job that starts afresh with the same code",
        body=ResubmitRequest,
    ),
    _of(
        "GET",
        "/jobs/{ref}/events",
        _VIEWER,
        jobs.list_job_events,
        EventPage,
        "What happened to a job, oldest first",
        params=_EVENTS,
    ),
    _of(
        "GET",
        "/jobs/{ref}/logs",
        _VIEWER,
        jobs.get_job_logs,
        str,
        "Logs, each line behind the number of its host",
        params=_LOGS,
        media_type=MediaType.TEXT,
    ),
    _of(
        "GET",
        "/jobs/{ref}/logs/stream",
        _VIEWER,
        jobs.stream_logs,
        str,
        "Log lines as they come, until the job has ended; Last-Event-ID goes on",
        params=(*_LOGS, Param("from", "instead of the header Last-Event-ID")),
        media_type=MediaType.EVENTS,
    ),
    _of(
        "GET",
        "/jobs/{ref}/result",
        _VIEWER,
        jobs.get_job_result,
        bytes,
        "The file `result` that a job left in its run folder, as it is",
        media_type=MediaType.BYTES,
    ),
    _of(
        "DELETE",
        "/jobs/{ref}/files",
        _MEMBER,
        jobs.delete_job_files,
        Acknowledgement,
        "Drop the result of a job that has ended, and its code, unless a live job runs that",
    ),
    _of(
        "POST",
        "/clean",
        _MEMBER,
        jobs.clean_jobs,
        CleanReport,
        "Clean away jobs that have ended: delete what they left, and list them no more",
        body=CleanRequest,
    ),
    _of(
        "GET",
        "/events",
        _VIEWER,
        jobs.list_events,
        EventPage,
        "What happened, oldest first",
        params=_EVENTS,
    ),
    _of(
        "GET",
        "/stream",
        _VIEWER,
        jobs.stream_events,
        str,
        "Events and changed jobs as they come; Last-Event-ID goes on",
        params=(_AFTER, Param("job", "only about this job")),
        media_type=MediaType.EVENTS,
    ),
    _of(
        "GET",
        "/slices",
        _VIEWER,
        jobs.list_slices,
        SlicePage,
        "Slices that are not gone",
        params=(
            Param("pool", "pool name"),
            Param("job", "job that they are held for"),
            Param("all", "anything: those that are gone too"),
        ),
    ),
    _of(
        "POST",
        "/slices/{id}/fault",
        _ADMIN,
        jobs.inject_fault,
        Acknowledgement,
        "Have the provider hurt a slice, for a drill",
        body=FaultRequest,
    ),
    _of(
        "POST",
        "/slices/{id}/errands",
        _ADMIN,
        host_commands.send_host_command,
        Acknowledgement,
        "Have a command or a check-up run on hosts, by their agents",
        body=HostCommandRequest,
    ),
    _of(
        "GET",
        "/slices/{id}/errands/{errand}",
        _ADMIN,
        host_commands.get_host_command,
        HostCommandReport,
        "What came of an errand",
    ),
    _of("GET", "/costs", _VIEWER, costs.get_costs, CostReport, "Chip hours, paid and lost"),
    _of("GET", "/stock", _VIEWER, costs.get_stock, StockReport, "Grants and refusals"),
    _of("GET", "/pools", _VIEWER, jobs.list_pools, PoolPage, "All pools"),
    _of("GET", "/pools/{name}", _VIEWER, jobs.get_pool, Pool, "One pool"),
    _of("PUT", "/pools/{name}", _ADMIN, jobs.put_pool, Pool, "Make or change a pool", body=Pool),
    _of(
        "DELETE",
        "/pools/{name}",
        _ADMIN,
        jobs.delete_pool,
        Acknowledgement,
        "Drop a pool that no job uses",
    ),
    _of(
        "HEAD",
        "/snapshots/{digest}",
        _MEMBER,
        jobs.head_snapshot,
        None,
        "200 when this code is here already, else 404",
        media_type=MediaType.ARCHIVE,
    ),
    _of(
        "PUT",
        "/snapshots/{digest}",
        _MEMBER,
        jobs.put_snapshot,
        Acknowledgement,
        "Upload code as a tar.gz",
        body=bytes,
        stream_body=True,
        limit=ANY_SIZE,
    ),
    _of("GET", "/users", _ADMIN, users.list_users, UserPage, "Everybody"),
    _of(
        "POST",
        "/users",
        _ADMIN,
        users.put_user,
        User,
        "Make a user or change a role",
        body=NewUser,
    ),
    _of(
        "DELETE",
        "/users/{name}",
        _ADMIN,
        users.delete_user,
        Acknowledgement,
        "Drop a user, their tokens and their secrets",
    ),
    _of(
        "GET",
        "/tokens",
        _VIEWER,
        users.list_tokens,
        TokenPage,
        "Your tokens; an admin sees all",
        params=(Param("user", "whose; for admins"),),
    ),
    _of(
        "POST", "/tokens", _VIEWER, users.create_token, CreatedToken, "Make a token", body=NewToken
    ),
    _of("DELETE", "/tokens/{id}", _VIEWER, users.revoke_token, Acknowledgement, "Withdraw a token"),
    _of(
        "GET",
        "/secrets",
        _MEMBER,
        users.list_secrets,
        SecretNames,
        "Names of your own secrets and of those that everybody shares",
    ),
    _of(
        "PUT",
        "/secrets/{name}",
        _MEMBER,
        users.put_secret,
        Acknowledgement,
        "Set a secret of your own; an admin also a shared one",
        body=SecretValue,
    ),
    _of(
        "DELETE",
        "/secrets/{name}",
        _MEMBER,
        users.delete_secret,
        Acknowledgement,
        "Drop an unused secret",
        params=(Param("shared", "anything: the one that all share"),),
    ),
    _of("GET", "/openapi.json", _VIEWER, jobs.get_openapi, dict, "This document"),
)
