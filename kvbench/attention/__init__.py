"""Attention over the slots of a cache: one oracle, one file per device, and the bridge to transformers."""
