"""Which accelerators the cluster's node auto-provisioning covers, read again every few minutes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from tpufleet.errors import BadRequest, NotFound, PermissionMissing
from tpufleet_gke.provisioner.gke.background_read import BackgroundRead

log = logging.getLogger("tpufleet_gke.provisioner")

REFRESH_AFTER = timedelta(minutes=5)


class AutoProvisioningLimits:
    """Only the first call is waited for: before, a pool could be bought that GKE buys too."""

    def __init__(self, read: Callable[[], frozenset[str]], timeout: timedelta) -> None:
        self._read_limits = read
        self._limits = BackgroundRead(self._read, "the cluster", timeout, REFRESH_AFTER)
        self._warned = False

    def close(self) -> None:
        self._limits.close()

    def accelerators(self, now: datetime) -> frozenset[str] | None:
        """None while nothing is known."""
        self._limits.update(now, wait_for_it=self._limits.value is None)
        return self._limits.value

    def _read(self) -> frozenset[str]:
        try:
            return self._read_limits()
        except (PermissionMissing, BadRequest, NotFound) as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "cannot read the limits of node auto-provisioning: %s; assuming that it is "
                    "off. If it is, set RESPECT_NODE_AUTO_PROVISIONING=false",
                    error,
                )
            return self._limits.value or frozenset()
