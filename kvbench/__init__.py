"""kvbench: what a KV-cache memory strategy does to throughput, latency and memory."""

import os

__version__ = "0.1.0"

# Read when torch is loaded: threads that spin while they wait slow down everything beside them, and its timing too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
