"""Does units of batch work, of which each is committed once, and writes that down."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from notes import LEDGER, here, me, note, others_alive

from tpufleet import runtime
from tpufleet.errors import Fenced
from tpufleet.runtime.object_store import FolderStore
from tpufleet.runtime.units import Units

units = Units(
    FolderStore(LEDGER / "units"),
    count=int(os.environ["UNITS"]),
    worker=str(here.process_id),
    incarnation=here.attempt,
    lease=timedelta(seconds=5),
)
note("start", after=-1, others=others_alive())
while not units.finished():
    if runtime.should_stop():
        units.leave()
        sys.exit(0)
    units.heartbeat()
    claim = units.claim()
    time.sleep(float(os.environ["STEP_SECONDS"]))
    if claim is None:
        continue  # others do the rest
    try:
        units.commit(claim, {"by": me})
    except Fenced:
        continue
    note("committed", unit=claim.unit, others=others_alive())
    runtime.progress(len(units.committed()), total=units.count)
note("finished", lines=0)
