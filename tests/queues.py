"""A queue that has a formula: random arrivals, constant service, one server."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbench.workloads.arrivals import Poisson
from kvbench.workloads.base import Load

Floats = npt.NDArray[np.float64]

SERVICE_S = 1.0


def arrivals_s(load: float, duration_s: float, seed: int) -> Floats:
    return Poisson().draw(Load(load / SERVICE_S, duration_s), 1, seed)[0]


def departures_s(arrival_s: Floats, service_s: float = SERVICE_S) -> Floats:
    """Lindley's recursion in closed form: who comes late finds the server idle."""
    served = np.arange(len(arrival_s)) * service_s
    finished: Floats = np.maximum.accumulate(arrival_s - served) + served + service_s
    return finished
