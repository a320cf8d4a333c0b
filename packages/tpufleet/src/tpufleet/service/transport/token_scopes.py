"""What a limited token may do, by scope. It never allows more than its user may."""

from __future__ import annotations

from tpufleet.errors import Forbidden
from tpufleet.model.job.jobs import Job
from tpufleet.model.people.users import TokenScope
from tpufleet.service.transport.auth import Caller

# By operation id of the route. Every token may ask who it is, replace itself, read the settings of
# its user, and log a browser in, whose session has the limits of the token.
_ALWAYS = frozenset(
    {
        "get_me", "get_openapi", "get_preferences", "rotate_token", "create_session", "get_session",
        "delete_session", "create_login_link",
    }
)  # fmt: skip
_SUBMIT = frozenset(
    {
        "submit_jobs", "check_jobs", "head_snapshot", "put_snapshot", "post_snapshot", "list_jobs",
        "get_job",
        "explain_job", "cancel_job", "list_job_events", "get_job_logs", "stream_logs",
        "get_job_result", "stream_events",
    }
)  # fmt: skip
# Of a process of a job, on that job. Nothing that creates another credential or another job.
_JOB = frozenset(
    {
        "get_me", "get_openapi", "get_job", "explain_job", "list_job_events", "job_metrics",
        "get_job_logs", "stream_logs", "get_job_result", "get_job_cost", "change_job", "cancel_job",
    }
)  # fmt: skip
_READ_METHODS = frozenset({"GET", "HEAD"})
_LIMITS = {
    TokenScope.FULL: "",
    TokenScope.READ: "it can only read",
    TokenScope.SUBMIT: "it can only submit, follow and cancel jobs of its user",
}


def permits(caller: Caller, method: str, operation: str) -> bool:
    scope = caller.scope
    if caller.job_id is not None:
        return operation in _JOB
    if operation in _ALWAYS:
        return True
    if scope is TokenScope.READ and method not in _READ_METHODS:
        return False
    return scope is not TokenScope.SUBMIT or operation in _SUBMIT


def require(caller: Caller, method: str, operation: str) -> None:
    if permits(caller, method, operation):
        return
    if caller.job_id is not None:
        raise Forbidden(
            f"the token of job {caller.job_id} does not allow this: its processes can only read, "
            "edit and cancel their own job\n  next: run the command outside the job"
        )
    raise Forbidden(
        f"token {caller.token_id} does not allow this: {_LIMITS[caller.scope]}\n"
        "  next: use another token, or create one with `tpu token create`"
    )


def require_job(caller: Caller, job: Job) -> None:
    """Whether the token reaches this job, to read or to change it."""
    if caller.scope is TokenScope.SUBMIT and job.owner != caller.name:
        raise limited(caller, f"jobs of {caller.name}")


def limited(caller: Caller, to: str) -> Forbidden:
    return Forbidden(f"token {caller.token_id} is limited to {to}")
