"""Simulated requests with several streams: random ones, beams that part at random, the prices of the slow reference."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from kvbench.core import Request
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


def parents(request: int, width: int, step: int) -> Seq[int] | None:
    """Some survive in place, the others go on from one of them; in most steps all do."""
    rng = random.Random(request * 1_000_003 + step)
    if rng.random() < 0.5:
        return None
    survivors = sorted(rng.sample(range(width), rng.randint(1, width)))
    return [i if i in survivors else rng.choice(survivors) for i in range(width)]


class Drawn:
    """`parents`, as the simulated runner asks for it."""

    def parents(self, request: int, width: int, step: int) -> Seq[int] | None:
        return parents(request, width, step)


def random_requests(rng: random.Random) -> list[Request]:
    """Samples and beams of one width or mixed, some of one stream."""
    rate = rng.choice([2.0, 10.0, 100.0])
    widths = rng.choice([[1, 2, 3], [2], [6], [4], [1, 6], [1]])
    beams = rng.choice([0.0, 0.5, 1.0])
    now = 0.0
    requests = []
    for index in range(rng.randint(1, 12)):
        now += rng.expovariate(rate)
        width = rng.choice(widths)
        lengths = rng.randint(1, 50), rng.choice([1, 2, rng.randint(1, 90), rng.randint(1, 90)])
        requests.append(Request(index, now, *lengths, width, width > 1 and rng.random() < beams))
    return requests


def with_prefixes(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Some of them begin with one of two prefixes."""
    lengths = rng.randint(1, 40), rng.choice([8, 16, 32, 48])
    for request in requests:
        request.prefix_len = rng.choice([0, *lengths])
        request.prompt_len += request.prefix_len
    return requests
