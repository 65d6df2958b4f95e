"""GPU kernels over KV caches whose slots lie where an allocator put them. Imports torch and triton only."""
