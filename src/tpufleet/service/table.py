"""Every route there is. Routing, authentication, roles and the OpenAPI document follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpufleet.model.costs import CostReport, StockReport
from tpufleet.model.errands import HostCommandRequest, HostCommandReport
from tpufleet.model.pools import Pool
from tpufleet.model.users import Role, User
from tpufleet.model.views import (
    ResubmitRequest,
    CleanRequest,
    CleanReport,
    Acknowledgement,
    EventPage,
    FaultRequest,
    JobDetail,
    JobPage,
    JobRow,
    CreatedToken,
    CurrentUser,
    NewToken,
    NewUser,
    PoolPage,
    SecretNames,
    SecretValue,
    SlicePage,
    SubmitRequest,
    TokenPage,
    UserPage,
    JobExplanation,
)
from tpufleet.service import api, errand_api, people, spending
from tpufleet.service.agent_api import AGENT_ROUTES
from tpufleet.service.routes import MediaType, Param, Route

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
    _of("GET", "/me", _VIEWER, api.get_me, CurrentUser, "Who you are"),
    _of(
        "POST", "/jobs", _MEMBER, api.submit_jobs, JobPage,
        "Submit jobs, all or nothing; sending one twice is one job",
        body=SubmitRequest, limit=SUBMIT_LIMIT,
    ),
    _of("GET", "/jobs", _VIEWER, api.list_jobs, JobPage, "Jobs, newest first", params=_JOBS),
    _of("GET", "/jobs/{ref}", _VIEWER, api.get_job, JobDetail, "One job by id, id prefix or name"),
    _of("GET", "/jobs/{ref}/why", _VIEWER, api.explain_job, JobExplanation, "Why it waits, or why it ended"),
    _of("POST", "/jobs/{ref}/cancel", _MEMBER, api.cancel_job, JobRow, "Stop it for good"),
    _of(
        "POST", "/jobs/{ref}/resume", _MEMBER, api.resume_job, JobRow,
        "A new job that goes on from the last checkpoint with the same code", body=ResubmitRequest,
    ),
    _of(
        "POST", "/jobs/{ref}/rerun", _MEMBER, api.rerun_job, JobRow,
        "A new job that starts afresh with the same code", body=ResubmitRequest,
    ),
    _of(
        "GET", "/jobs/{ref}/events", _VIEWER, api.list_job_events, EventPage,
        "What happened to a job, oldest first", params=_EVENTS,
    ),
    _of(
        "GET", "/jobs/{ref}/logs", _VIEWER, api.get_job_logs, str,
        "Logs, each line behind the number of its host", params=_LOGS, kind=MediaType.TEXT,
    ),
    _of(
        "GET", "/jobs/{ref}/logs/stream", _VIEWER, api.stream_logs, str,
        "Log lines as they come, until the job has ended; Last-Event-ID goes on",
        params=(*_LOGS, Param("from", "instead of the header Last-Event-ID")),
        kind=MediaType.EVENTS,
    ),
    _of(
        "GET", "/jobs/{ref}/result", _VIEWER, api.get_job_result, bytes,
        "The file `result` that a job left in its run folder, as it is", kind=MediaType.BYTES,
    ),
    _of(
        "DELETE", "/jobs/{ref}/files", _MEMBER, api.delete_job_files, Acknowledgement,
        "Drop the result of a job that has ended, and its code, unless a live job runs that",
    ),
    _of(
        "POST", "/clean", _MEMBER, api.clean_jobs, CleanReport,
        "Clean away jobs that have ended: delete what they left, and list them no more",
        body=CleanRequest,
    ),
    _of(
        "GET", "/events", _VIEWER, api.list_events, EventPage, "What happened, oldest first",
        params=_EVENTS,
    ),
    _of(
        "GET", "/stream", _VIEWER, api.stream_events, str,
        "Events and changed jobs as they come; Last-Event-ID goes on",
        params=(_AFTER, Param("job", "only about this job")), kind=MediaType.EVENTS,
    ),
    _of(
        "GET", "/slices", _VIEWER, api.list_slices, SlicePage, "Slices that are not gone",
        params=(
            Param("pool", "pool name"),
            Param("job", "job that they are held for"),
            Param("all", "anything: those that are gone too"),
        ),
    ),
    _of(
        "POST", "/slices/{id}/fault", _ADMIN, api.inject_fault, Acknowledgement,
        "Have the provider hurt a slice, for a drill", body=FaultRequest,
    ),
    _of(
        "POST", "/slices/{id}/errands", _ADMIN, errand_api.send_host_command, Acknowledgement,
        "Have a command or a check-up run on hosts, by their agents", body=HostCommandRequest,
    ),
    _of(
        "GET", "/slices/{id}/errands/{errand}", _ADMIN, errand_api.get_host_command, HostCommandReport,
        "What came of an errand",
    ),
    _of("GET", "/costs", _VIEWER, spending.get_costs, CostReport, "Chip hours, paid and lost"),
    _of("GET", "/stock", _VIEWER, spending.get_stock, StockReport, "Grants and refusals"),
    _of("GET", "/pools", _VIEWER, api.list_pools, PoolPage, "All pools"),
    _of("GET", "/pools/{name}", _VIEWER, api.get_pool, Pool, "One pool"),
    _of("PUT", "/pools/{name}", _ADMIN, api.put_pool, Pool, "Make or change a pool", body=Pool),
    _of("DELETE", "/pools/{name}", _ADMIN, api.delete_pool, Acknowledgement, "Drop a pool that no job uses"),
    _of(
        "HEAD", "/snapshots/{digest}", _MEMBER, api.head_snapshot, None,
        "200 when this code is here already, else 404", kind=MediaType.ARCHIVE,
    ),
    _of(
        "PUT", "/snapshots/{digest}", _MEMBER, api.put_snapshot, Acknowledgement,
        "Upload code as a tar.gz", body=bytes, stream_body=True, limit=ANY_SIZE,
    ),
    _of("GET", "/users", _ADMIN, people.list_users, UserPage, "Everybody"),
    _of(
        "POST", "/users", _ADMIN, people.put_user, User, "Make a user or change a role",
        body=NewUser,
    ),
    _of(
        "DELETE", "/users/{name}", _ADMIN, people.delete_user, Acknowledgement,
        "Drop a user, their tokens and their secrets",
    ),
    _of(
        "GET", "/tokens", _VIEWER, people.list_tokens, TokenPage, "Your tokens; an admin sees all",
        params=(Param("user", "whose; for admins"),),
    ),
    _of("POST", "/tokens", _VIEWER, people.create_token, CreatedToken, "Make a token", body=NewToken),
    _of("DELETE", "/tokens/{id}", _VIEWER, people.revoke_token, Acknowledgement, "Withdraw a token"),
    _of(
        "GET", "/secrets", _MEMBER, people.list_secrets, SecretNames,
        "Names of your own secrets and of those that everybody shares",
    ),
    _of(
        "PUT", "/secrets/{name}", _MEMBER, people.put_secret, Acknowledgement,
        "Set a secret of your own; an admin also a shared one", body=SecretValue,
    ),
    _of(
        "DELETE", "/secrets/{name}", _MEMBER, people.delete_secret, Acknowledgement,
        "Drop an unused secret", params=(Param("shared", "anything: the one that all share"),),
    ),
    _of("GET", "/openapi.json", _VIEWER, api.get_openapi, dict, "This document"),
)
