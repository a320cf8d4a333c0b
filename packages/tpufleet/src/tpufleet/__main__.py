"""The `tpu` command.

Nothing is imported before it is needed: `tpu --help` responds at once, and an agent, of which a
fleet has thousands, starts without loading the command line.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import Sequence


def run(args: Sequence[str]) -> int:
    """The exit status."""
    if list(args) == ["agent"]:
        from tpufleet.agent import main as agent

        return agent.run(os.environ)
    from tpufleet.views.cli import program

    return program.run(args)


def main() -> None:
    if sys.stderr is not None:  # a caller may have closed it
        faulthandler.enable()  # prints Python stacks when a native library crashes
    status: int | None = None

    def skip_teardown() -> None:
        """The last of all exit handlers, so threads have ended and devices are released. Freeing
        the objects of JAX one by one takes another half second."""
        if status is not None:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(status)

    if sys.argv[1:3] == ["extract", "run"]:
        atexit.register(skip_teardown)
    status = run(sys.argv[1:])
    sys.exit(status)


if __name__ == "__main__":
    main()
