"""How the C library of a worker process manages its heap.

By default it gives every large block back to the system when it is freed. A step then spends up to a third of its time
on page faults for activations and gradients, and a recovery more than that for parameters and optimizer state.
"""

# For glibc, which reads them when a process starts. One heap for all threads, since only the first can keep what is
# freed; blocks of up to 32 MiB (it allows no more) come from it; free memory at its end stays.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
