"""What all commands have in common: how they end, and what they say when they end early."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from kvbench.core import KvbenchError

MISTAKE, INTERRUPTED = 2, 130
"""Exit statuses."""


def run(name: str, action: Callable[[], int], kept: str = "nothing was written") -> int:
    """Run a command and tell mistakes and interruptions in a line or two on stderr.

    Args:
        name: what its messages begin with: ``kvbench.compare``.
        action: does the work; returns the exit status: 0, or 1 where the work was done and failed.
        kept: what is left when it is interrupted, unless the interruption says so itself.

    Returns:
        The exit status: that of the action, 2 for a user's mistake, 130 after Ctrl-C.
    """
    try:
        return action()
    except KvbenchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt as error:
        print(f"{name}: {str(error) or f'interrupted; {kept}'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: the reader has seen enough, and the results are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed there at exit
        return 0
