"""What all commands have in common: how they end, and what they say when they end early."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from kvbench.core import KvbenchError

MISTAKE, INTERRUPTED = 2, 130
"""Exit statuses."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that name no file."""


def run(name: str, action: Callable[[], int], kept: str = "nothing was written") -> int:
    """Run a command and tell mistakes and interruptions in a line or two on stderr.

    Args:
        name: what its messages begin with: ``kvbench.compare``.
        action: does the work; returns the exit status: 0, or 1 where the work was done and failed.
        kept: what is left when it is interrupted, unless the interruption says so itself.

    Returns:
        The exit status: that of the action, 2 for a user's mistake or a place that cannot be written, 130
        after Ctrl-C.
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
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        what = f"{error.filename} cannot be read or written: " if error.filename is not None else ""
        print(f"{name}: {what}{error.strerror}", file=sys.stderr)
        return MISTAKE
