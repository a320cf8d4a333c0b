"""Submit a JAX job once; it finishes.

From Python::

    import tpufleet

    job = tpufleet.run("v5e-16", "python train.py", tags=["baseline"])
    job.wait()

    future = tpufleet.submit(simulate, seed, accelerator="v5e-8")
    future.result()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpufleet import host_packages

if TYPE_CHECKING:
    from tpufleet.views.python.functions import Future, attach, map, submit, submit_all
    from tpufleet.views.python.job_handle import Job, JobFailed, job, jobs, run
    from tpufleet.views.python.session import connect

__version__ = "0.1.0"
__all__ = [
    "Future",
    "Job",
    "JobFailed",
    "attach",
    "connect",
    "job",
    "jobs",
    "map",
    "run",
    "submit",
    "submit_all",
]

host_packages.make_importable()


def __getattr__(name: str) -> Any:
    """Loaded when first used: agents and workloads import this package too."""
    if name in __all__:
        from tpufleet.views import python

        return getattr(python, name)
    raise AttributeError(f"module 'tpufleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
