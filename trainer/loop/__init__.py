"""The only host loop: fit, evaluate and predict are phases of it; and where a run stands.

Owns the order of batches, executions, callbacks and save points. It must not compute: steps do.
"""
