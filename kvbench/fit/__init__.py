"""How well iteration costs carry: fits to the paper's latency curves, and the tables of ``docs/fidelity.md``."""
