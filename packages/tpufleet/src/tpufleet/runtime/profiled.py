"""Makes a program that does not import tpufleet answer `tpu profile`, without changing it.

python -m tpufleet.runtime.profiled train.py lr=0.1
python -m tpufleet.runtime.profiled -m package.train lr=0.1
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tpufleet.runtime.profiling import start_profile_listener

USAGE = "usage: python -m tpufleet.runtime.profiled (PROGRAM.py | -m MODULE) [ARGUMENT…]"


def main(arguments: list[str]) -> None:
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit(USAGE)
    start_profile_listener()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).absolute().parent)  # as `python PROGRAM.py` does
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
