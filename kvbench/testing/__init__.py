"""The conformance suite: is this an allocator? For the allocators here and for anybody's.

``AllocatorMachine`` is a hypothesis state machine to subclass in your own tests; ``examine`` runs it and the directed
checks and reports every law; ``python -m kvbench.verify package:Class`` does so from the command line.
"""

from kvbench.testing.checks import CHECKS, drive
from kvbench.testing.examine import examine
from kvbench.testing.laws import Broken, Law
from kvbench.testing.machine import AllocatorMachine, first_broken
from kvbench.testing.shadow import Shadow

__all__ = ["CHECKS", "AllocatorMachine", "Broken", "Law", "Shadow", "drive", "examine", "first_broken"]
