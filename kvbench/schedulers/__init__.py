"""Who runs when: the only callers of an allocator."""
