"""GPU kernels over KV caches whose slots lie where an allocator put them. Imports torch and triton only.

``reference`` has every function in plain torch, for any device; ``device`` has the same functions, launched as Triton
kernels; ``plan`` decides tile sizes and splits on the host. Only ``device`` needs triton.

All of them address a cache the same way. K and V of one layer are ``[rows, kv_heads, head_dim]``, a row being the slot
of one token. Token ``j`` of sequence ``b`` is in row ``table[b, j // page] * page + j % page`` where blocks are
scattered (*paged*), and in row ``base[b] + j`` where its tokens lie side by side (*contiguous*: slabs of the maximum
length, Orca's reserved chunks, virtually contiguous memory). A paged cache may also be ``[blocks, page, kv_heads,
head_dim]`` with any distance between blocks, as in a pool whose blocks hold all layers.
"""
