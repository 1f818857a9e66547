"""The ambient context: the strategy in scope, the step being traced, JAX's configuration, the switch of workarounds.

Owns the single frozen context, and its copies for threads and other processes. It must not know the rooms that own the
fields.
"""
