"""Try several learning rates, one job each, and pick the best.

python examples/sweep/sweep.py                       # simulated slices, or the configured server
python examples/sweep/sweep.py v5e-8 0.01 0.03 0.1   # the type of slice, then the rates
"""

import sys
from pathlib import Path

import tpufleet

HERE = str(Path(__file__).parent)


def main(accelerator: str = "v5e-1", *rates: str) -> None:
    rates = rates or ("0.001", "0.01", "0.1", "1.5")
    jobs = {
        rate: tpufleet.run(
            accelerator,
            ["python", "train.py", f"lr={rate}"],
            name=f"sweep-{rate.replace('.', '-')}",
            workdir=HERE,
            tags=["sweep"],
            capacity=["spot", "on-demand"],
        )
        for rate in rates
    }  # all are submitted; each waits for a slice of its own
    losses = {}
    for rate, job in jobs.items():
        if job.wait(check=False).state == "succeeded":
            losses[rate] = job.row.progress.metrics["loss"]  # of the last report
            print(f"lr={rate}: loss {losses[rate]:.6g}")
        else:
            print(f"lr={rate}: {job.state}; `tpu why {job.name}` explains")
    if not losses:
        sys.exit("no job succeeded")
    best = min(losses, key=losses.__getitem__)
    print(f"best: lr={best}, job {jobs[best].name}")
    print(f"next: tpu compare {' '.join(job.id for job in jobs.values())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
