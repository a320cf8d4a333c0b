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

log = logging.getLogger(__name__)


def containment_of_jobs(settings: Config, hidden: Sequence[Path]) -> Containment:
    """What the agents on this machine will use. Raises BadInput when jobs cannot run as the user
    that is configured; without that setting the strongest that works is chosen."""
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
    try:
        return containment.with_users(detected, "", UNPRIVILEGED_USER)
    except ValueError as error:
        log.warning("jobs of members on `local` run as root, like those of admins: %s", error)
        return detected


def users_of_jobs(settings: Config, contained: Containment) -> tuple[str | None, str | None]:
    """Names of the users of all jobs, and of the jobs of members; None: the server's own."""
    everyone = settings.local_user if contained.user is not None else None
    return everyone, UNPRIVILEGED_USER if contained.member_user is not None else None


def report(contained: Containment) -> None:
    """In the server's log: which guarantee holds on this machine."""
    level = logging.INFO if contained.isolated else logging.WARNING
    log.log(level, "jobs on `local`: %s", contained.description)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in containers that run as an arbitrary user
        return str(os.geteuid())
