"""A connection for tests that outlasts a machine that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.polling import Patience
from tpufleet.errors import Conflict, ProviderUnavailable, RateLimited
from tpufleet.kubernetes.connections import Connection, Json, ResourceKind

WITHIN = 300.0  # seconds


class PatientConnection(Connection):
    """Repeats what the API server gave up: it gives a change 34 seconds and a webhook 10, and a
    virtual machine may stand still for longer. The controller repeats it just so, one tick later.
    """

    def get(self, *arguments: Any) -> Json:
        return _repeated(lambda: super(PatientConnection, self).get(*arguments))

    def list(self, *arguments: Any, **options: Any) -> tuple[list[Json], str]:
        return _repeated(lambda: super(PatientConnection, self).list(*arguments, **options))

    def patch(self, *arguments: Any, **options: Any) -> Json:
        return _repeated(lambda: super(PatientConnection, self).patch(*arguments, **options))

    def apply(self, *arguments: Any) -> Json:
        return _repeated(lambda: super(PatientConnection, self).apply(*arguments))

    def delete(self, *arguments: Any) -> None:
        return _repeated(lambda: super(PatientConnection, self).delete(*arguments))

    def create(self, kind: ResourceKind, resource: Json) -> Json:
        def was_created() -> Json:
            metadata = resource["metadata"]
            return self.get(kind, metadata["name"], metadata.get("namespace"))

        return _repeated(lambda: super(PatientConnection, self).create(kind, resource), was_created)


def _repeated(call: Callable[[], Any], had_effect: Callable[[], Any] | None = None) -> Any:
    """`had_effect`: what to do about a conflict with what was given up before."""
    patience = Patience(WITHIN)
    repeated = False
    while True:
        try:
            return call()
        except (ProviderUnavailable, RateLimited):
            if patience.is_over:
                raise
        except Conflict:
            if not repeated or had_effect is None:
                raise
            return had_effect()
        repeated = True
        time.sleep(0.5)
