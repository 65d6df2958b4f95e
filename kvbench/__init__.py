"""kvbench: what a KV-cache memory strategy does to throughput, latency and memory."""

__version__ = "0.1.0"
