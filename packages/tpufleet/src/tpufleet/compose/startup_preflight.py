"""Before the first spend: the cloud project is checked once, in the background."""

from __future__ import annotations

import logging
import threading

from tpufleet.compose.providers import preflight
from tpufleet.config import Config
from tpufleet.errors import FleetError
from tpufleet.model.fleet.preflight import CheckStatus, passed
from tpufleet.model.values import encoding

log = logging.getLogger("tpufleet.preflight")


def check_cloud_once(settings: Config) -> threading.Thread | None:
    """Log what `tpu init check` finds, until it passed once. Jobs wait for nothing: a project that
    cannot be checked may still work."""
    report = settings.data / "preflight.json"
    if report.exists():
        return None
    thread = threading.Thread(target=_check, args=(settings,), name="preflight", daemon=True)
    thread.start()
    return thread


def _check(settings: Config) -> None:
    try:
        checks = preflight(settings)
    except FleetError as error:
        log.warning("cannot check the cloud project: %s", error)
        return
    for check in checks:
        if check.status is CheckStatus.FAILED:
            log.error("%s: %s; next: %s", check.name, check.message, check.fix or "tpu init check")
    if passed(checks):
        (settings.data / "preflight.json").write_bytes(encoding.to_json(checks))
