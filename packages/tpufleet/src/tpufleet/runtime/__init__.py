"""The library for workloads. It works the same inside tpufleet and standalone.

Example::

    from tpufleet import runtime

    runtime.initialize()
    newest = runtime.checkpoints.latest()
    for step in range(start, total):
        ...
        runtime.progress(step, total=total, loss=loss)
        if runtime.should_stop_together():
            runtime.checkpoints.save(step, write)
            break
"""

from tpufleet.runtime import checkpoints
from tpufleet.runtime.context import Context, context
from tpufleet.runtime.distributed import agree, initialize, should_stop_together
from tpufleet.runtime.global_batch import GlobalBatch, global_batch
from tpufleet.runtime.profiling import start_profile_listener
from tpufleet.runtime.progress_file import progress
from tpufleet.runtime.stop_signal import install_stop_handler, should_stop

__all__ = [
    "Context",
    "GlobalBatch",
    "agree",
    "checkpoints",
    "context",
    "global_batch",
    "initialize",
    "install_stop_handler",
    "progress",
    "should_stop",
    "should_stop_together",
    "start_profile_listener",
]
