"""Rates that no memory strategy can sustain: of this engine without any waste of memory, and of the machine itself.

Both rest on one count. A request holds ``prompt + j`` tokens in the iteration that computes its output token ``j + 1``,
whoever schedules it, and however often it is preempted; so it takes ``prompt * output + output * (output - 1) / 2``
token-iterations. An iteration has room for as many as the pool has slots, which bounds the iterations per second from
below for every rate. Requests that share what they hold are not covered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvbench.capacity import Hardware, Model
from kvbench.runners.simulated import IterationCosts
from kvbench.statistics import Floats


class Demand(NamedTuple):
    """What a request takes, on average over a trace.

    Attributes:
        prompt_len: tokens.
        square_len: of the prompt, squared.
        output_len: tokens, hence iterations.
        held: token-iterations.
    """

    prompt_len: float
    square_len: float
    output_len: float
    held: float

    @classmethod
    def of(cls, prompt_lens: Floats, output_lens: Floats) -> Demand:
        """Of the requests with these lengths."""
        held = prompt_lens * output_lens + output_lens * (output_lens - 1) / 2
        return cls(*(float(np.mean(each)) for each in (prompt_lens, prompt_lens**2, output_lens, held)))


def zero_waste(demand: Demand, costs: IterationCosts, num_slots: int) -> float:
    """Requests/s of an engine with these costs if every slot held a token in every iteration, and none was lost.

    The price per request of context, prompts and requests is what it is; the fixed price of an iteration is shared by
    as many requests as the pool holds. Where a large batch costs more than it saves, the batch is as large as is best.
    """
    c_large = costs.c_ms if costs.c_large_ms is None else costs.c_large_ms
    fewest = demand.held / num_slots

    def ms(iterations: float) -> float:
        above = max(demand.output_len - costs.c_knee * iterations, 0.0)
        fixed = costs.a_ms * iterations + costs.c_ms * demand.output_len + (c_large - costs.c_ms) * above
        prompts = costs.p_ms * demand.prompt_len + costs.q_ms * demand.square_len
        return fixed + prompts + costs.b_ms * costs.context_factor(16) * (demand.held - demand.prompt_len)

    return 1e3 / min(ms(fewest), ms(max(fewest, demand.output_len / costs.c_knee)))


def roofline(demand: Demand, model: Model, hardware: Hardware, num_slots: int) -> float | None:
    """Requests/s at the peak of what the GPUs read and compute, with a pool that is full of tokens.

    An iteration reads the weights once and what it attends to; a token takes two operations for each parameter. The
    larger of both times counts (Williams, Waterman and Patterson, CACM 52(4), 2009). Attention's own operations,
    activations and communication are left out. None where the hardware's peaks are not known.
    """
    if hardware.gpu_gb_per_s is None or hardware.gpu_tflops is None:
        return None
    read_bytes = demand.held / num_slots * model.num_parameters * model.value_bytes + demand.held * model.bytes_per_slot
    operations = 2 * model.num_parameters * (demand.prompt_len + demand.output_len - 1)
    read_s = read_bytes / (hardware.num_gpus * hardware.gpu_gb_per_s * 1e9)
    return 1 / max(read_s, operations / (hardware.num_gpus * hardware.gpu_tflops * 1e12))
