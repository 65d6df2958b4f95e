"""The simulated runner with the prices of the slow reference."""

from __future__ import annotations

from kvbench.runners.simulated import Beams, IterationCosts, Simulated
from tests.reference_streams import StreamCosts


def simulated(prices: StreamCosts, beams: Beams | None = None) -> Simulated:
    """In the units of ``Simulated``: a slot is 1 MB, in one layer."""
    costs = IterationCosts(
        *(prices.a, prices.b, prices.c, prices.p, prices.q),
        s_ms=prices.s,
        beam_ms=prices.beam,
        copy_gb_per_s=2 / prices.copied_slot,
        swap_out_call_us=1000 * prices.out_piece,
        swap_out_gb_per_s=1 / prices.out_slot,
        swap_in_call_us=1000 * prices.in_piece,
        swap_in_gb_per_s=1 / prices.in_slot,
        prefix_weight=prices.prefix_weight,
        weights_ms=prices.weights,
        alone_ms=prices.alone,
    )
    return Simulated(costs, bytes_per_slot=1_000_000, num_layers=1, beams=beams)
