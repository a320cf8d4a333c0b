"""The user that jobs on the provider `local` run as. They run on the server's own machine."""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from tpufleet.agent.workload import containment
from tpufleet.agent.workload.containment import Containment
from tpufleet.agent.workload.job_user import UNPRIVILEGED_USER
from tpufleet.config import Config
from tpufleet.errors import BadInput
from tpufleet.model.fleet.server_status import LocalJobs

log = logging.getLogger(__name__)


def containment_of_jobs(settings: Config, hidden: Sequence[Path]) -> Containment:
    """What the agents on this machine will use. Raises BadInput when jobs cannot run as the user
    that is configured; without that setting the strongest that works is chosen. On a server that
    only its own machine reaches, admins may keep its user: they are the people of that machine."""
    local = settings.data / "local"
    detected = containment.detect(local, hidden)
    name = settings.local_user
    if name == _own_name() or (name is None and os.geteuid() != 0):
        return detected
    if name is not None:
        try:
            return containment.with_users(detected, name)
        except ValueError as error:
            raise BadInput(f"local_user: {error}") from error
    everyone, members = (UNPRIVILEGED_USER, "") if settings.exposed else ("", UNPRIVILEGED_USER)
    try:
        return containment.with_users(detected, everyone, members)
    except ValueError as error:
        log.warning("jobs of all users on `local` run as root: %s", error)
        return detected


def users_of_jobs(contained: Containment) -> tuple[str | None, str | None]:
    """Names of the users of all jobs, and of the jobs of members; None: the server's own."""
    everyone, members = contained.user, contained.member_user
    return everyone.name if everyone else None, members.name if members else None


def report(contained: Containment) -> LocalJobs:
    """Which guarantee holds on this machine. In the server's log too."""
    as_server = "as the server's user" if os.geteuid() else "as root"
    restricted = contained.user is not None or contained.member_user is not None
    users = "" if restricted else f"; they run {as_server}"
    level = logging.INFO if contained.isolated else logging.WARNING
    log.log(level, "jobs on `local`: %s%s", contained.description, users)
    return LocalJobs(description=contained.description + users, isolated=contained.isolated)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in containers that run as an arbitrary user
        return str(os.geteuid())
