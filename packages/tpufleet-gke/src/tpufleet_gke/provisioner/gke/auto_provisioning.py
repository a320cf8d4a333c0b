"""Which accelerators the cluster's node auto-provisioning covers, read again every few minutes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta

from tpufleet.errors import BadRequest, NotFound, PermissionMissing, ProviderUnavailable

log = logging.getLogger("tpufleet_gke.provisioner")

REFRESH_AFTER = timedelta(minutes=5)


class AutoProvisioningLimits:
    """Only the first call is waited for: before, a pool could be bought that GKE buys too."""

    def __init__(self, read: Callable[[], frozenset[str]], timeout: timedelta) -> None:
        self._read = read
        self._timeout = timeout.total_seconds()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="auto-provisioning")
        self._call: Future[frozenset[str]] | None = None
        self._accelerators: frozenset[str] | None = None
        self._read_at: datetime | None = None
        self._warned = False

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def accelerators(self, now: datetime) -> frozenset[str]:
        """Raises ProviderUnavailable while nothing is known."""
        if self._call is None and (self._read_at is None or now - self._read_at >= REFRESH_AFTER):
            self._call, self._read_at = self._executor.submit(self._read), now
        if self._call is not None and (self._accelerators is None or self._call.done()):
            self._take_result(self._call)
        return self._accelerators if self._accelerators is not None else frozenset()

    def _take_result(self, call: Future[frozenset[str]]) -> None:
        try:
            self._accelerators = call.result(self._timeout)
        except TimeoutError as error:
            raise ProviderUnavailable(
                f"GKE has not described the cluster within {self._timeout:g} s"
            ) from error
        except (PermissionMissing, BadRequest, NotFound) as error:
            self._accelerators = self._accelerators or frozenset()
            if not self._warned:
                self._warned = True
                log.warning(
                    "cannot read the limits of node auto-provisioning: %s; assuming that it is "
                    "off. If it is, set RESPECT_NODE_AUTO_PROVISIONING=false",
                    error,
                )
        except ProviderUnavailable:
            self._call = None
            if self._accelerators is None:
                self._read_at = None
                raise
            return
        self._call = None
