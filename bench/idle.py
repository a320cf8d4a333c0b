"""What the program costs when it does nothing: memory of an idle server, and time of `tpu --help`.

Times are CPU time of the whole child process, for wall time on a shared machine tells of others.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import servers
from reporting import Measure, report, run_benchmark


def child_seconds(command: Sequence[str]) -> tuple[float, float]:
    """CPU and wall time of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def median_seconds(command: Sequence[str], rounds: int) -> tuple[float, float]:
    child_seconds(command)  # from now on the files are in memory
    runs = [child_seconds(command) for _ in range(rounds)]
    return statistics.median(cpu for cpu, _ in runs), statistics.median(wall for _, wall in runs)


def program() -> list[str]:
    """The installed `tpu` beside this Python, where there is one."""
    installed = os.path.join(os.path.dirname(sys.executable), "tpu")
    return [installed] if os.path.exists(installed) else [sys.executable, "-m", "tpufleet"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the server idles")
    parser.add_argument("--rounds", type=int, default=10, help="repetitions of each command")
    options = parser.parse_args()
    with servers.state_folder() as home, servers.plain_server(home) as server:
        time.sleep(2.0)
        used = server.cpu_seconds
        time.sleep(options.seconds)
        memory, cores = server.memory_mb, (server.cpu_seconds - used) / options.seconds
    cpu, wall = median_seconds([*program(), "--help"], options.rounds)
    bare_cpu, bare_wall = median_seconds([sys.executable, "-c", "pass"], options.rounds)
    report(
        "idle",
        [
            Measure(
                name="memory of an idle `tpu serve`",
                ours=memory,
                unit="MB",
                goal=100,
                anchor=366,
                peer="dstack",
            ),
            Measure(
                name="`tpu --help`, CPU, median",
                ours=cpu,
                unit="s",
                goal=0.1,
                anchor=1.7,
                peer="dstack",
            ),
            Measure(name="`tpu --help`, wall", ours=wall, unit="s"),
            Measure(name="`python -c pass`, CPU", ours=bare_cpu, unit="s"),
            Measure(name="`python -c pass`, wall", ours=bare_wall, unit="s"),
            Measure(name="CPU of the idle server", ours=cores, unit="cores"),
        ],
    )


if __name__ == "__main__":
    run_benchmark(main)
