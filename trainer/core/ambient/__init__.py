"""What code finds around it without being given it: the strategy in scope, the step being traced, JAX's configuration,
the switch of workarounds.

Owns the one frozen context, and how threads and other processes get what they may have of it. It must not know the
rooms that its fields are of.
"""
