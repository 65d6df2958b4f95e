"""Who held which slot of the pool, when and for what: recorded during a run, read as rectangles, drawn."""

from kvbench.memory_map.map import MemoryMap, Purpose, load

__all__ = ["MemoryMap", "Purpose", "load"]
