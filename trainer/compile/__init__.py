"""Compilation: the only place that calls `jax.jit` and `shard_map`, and what surrounds it.

Owns donation, the cache of programs on disk, the count of recompilations, the cost of a step, and traces, which are
read and rewritten. It must not know what is compiled: no models, losses or strategies.
"""
