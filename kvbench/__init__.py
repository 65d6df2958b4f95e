"""kvbench: what a KV-cache memory strategy does to throughput, latency and memory."""

import os

__version__ = "0.1.0"

# Read when torch is loaded. A thread that waits spins for some 0.2 ms, longer than the gaps inside a forward pass, then
# sleeps: one that sleeps at once costs a decode step up to 20 ms, one that spins on slows down everything beside it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
