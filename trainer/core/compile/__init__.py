"""Compilation: the only place that calls `jax.jit` and `shard_map`.

Owns donation, the cache of programs on disk, the count of recompilations, the cost of a step, and traces, which it
reads and rewrites. It must not know the compiled code: no models, losses or strategies.
"""
