"""The Python front door: what `import tpufleet` offers to scripts and notebooks."""

from tpufleet.views.python.functions import Future, attach, map, submit, submit_all
from tpufleet.views.python.job_handle import Job, JobFailed, job, jobs, run
from tpufleet.views.python.session import connect

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
