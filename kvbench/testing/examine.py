"""Every law of one allocator: held, broken, or not asked."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.allocators.base import Allocator
from kvbench.testing.checks import CHECKS
from kvbench.testing.laws import Broken, Law
from kvbench.testing.machine import first_broken
from kvbench.testing.shadow import Shadow

DEPTHS = (4, 10, 30)  # calls of a run; what a short run finds is easy to read


def examine(build: Callable[[], Allocator], num_examples: int = 100) -> dict[Law, Broken]:
    """The laws that an allocator breaks, each with a short sequence of calls that shows it.

    The state machine is run with few calls, then with more, until it finds nothing but laws that it reported already:
    each is judged in the runs in which the others held. Then come the directed checks.

    Args:
        build: makes a new allocator, the same every time.
        num_examples: runs of the machine at each depth.

    Returns:
        Empty if the allocator conforms.
    """
    found: dict[Law, Broken] = {}
    try:
        Shadow(build)
    except Broken as broken:
        return {broken.law: broken}
    for num_calls in DEPTHS:
        while True:
            seen = first_broken(build, num_examples=num_examples, num_calls=num_calls, waived=frozenset(found))
            if seen is None or seen.law in found:
                break
            found[seen.law] = seen
    for check in CHECKS:
        try:
            check(build)
        except Broken as broken:
            found.setdefault(broken.law, broken)
    return found
