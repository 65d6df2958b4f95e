"""How many slots a sequence is guaranteed when it is admitted: one rule each, independent of where they lie.

The first three are those of the PagedAttention authors' Orca baselines: the guarantee covers the whole request, which
never has to ask for more. On demand guarantees nothing, and the sequence grows.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from kvbench.core import Request


class Reservation(Protocol):
    """A pure function of the request and the longest sequence the model can hold."""

    name: ClassVar[str]
    uses_true_lengths: ClassVar[bool]
    """Whether it looks at ``output_len``, which a real system does not know; recorded with every result."""
    grows: ClassVar[bool]
    """Whether a sequence may outgrow what it was guaranteed."""
    fits_slabs: ClassVar[bool]
    """Whether it asks for the longest sequence, whatever the request: placement may grant slabs of that length only."""
    foresees: ClassVar[bool]
    """Whether only those are admitted that will find room in every step to their end (``schedulers.foresight``), so
    that nobody is preempted. One that foresees uses true lengths, and grows."""

    def slots(self, request: Request, max_model_len: int) -> int:
        """Slots to guarantee at admission; the scheduler grants at least the tokens present."""
        ...


class Max:
    """The longest sequence the model can hold, whatever the request (Orca Max, FasterTransformer)."""

    name: ClassVar[str] = "max"
    uses_true_lengths: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    fits_slabs: ClassVar[bool] = True
    foresees: ClassVar[bool] = False

    def slots(self, request: Request, max_model_len: int) -> int:
        """``max_model_len``."""
        return max_model_len


class Pow2:
    """The prompt and the output rounded up to a power of two, at most twice what is needed (Orca Pow2)."""

    name: ClassVar[str] = "pow2"
    uses_true_lengths: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    fits_slabs: ClassVar[bool] = False
    foresees: ClassVar[bool] = False

    def slots(self, request: Request, max_model_len: int) -> int:
        """``min(prompt + 2**ceil(log2(output)), max_model_len)``: an output of 25 reserves 32."""
        return min(request.prompt_len + (1 << (request.output_len - 1).bit_length()), max_model_len)


class Oracle:
    """Exactly the prompt and the output (Orca Oracle): an upper bound no real system reaches."""

    name: ClassVar[str] = "oracle"
    uses_true_lengths: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    fits_slabs: ClassVar[bool] = False
    foresees: ClassVar[bool] = False

    def slots(self, request: Request, max_model_len: int) -> int:
        """``min(prompt + output, max_model_len)``."""
        return min(request.prompt_len + request.output_len, max_model_len)


class Clairvoyant:
    """Nothing beyond the tokens present, to those who will find room for every token to their end.

    Nobody is ever preempted. Admission looks at the true lengths of all that run (``kvbench.schedulers.foresight``): a
    yardstick that no real system reaches.
    """

    name: ClassVar[str] = "clairvoyant"
    uses_true_lengths: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    fits_slabs: ClassVar[bool] = False
    foresees: ClassVar[bool] = True

    def slots(self, request: Request, max_model_len: int) -> int:
        """0."""
        return 0


class OnDemand:
    """Nothing beyond the tokens present (vLLM)."""

    name: ClassVar[str] = "on_demand"
    uses_true_lengths: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    fits_slabs: ClassVar[bool] = False
    foresees: ClassVar[bool] = False

    def slots(self, request: Request, max_model_len: int) -> int:
        """0."""
        return 0
