"""The only host loop, with the phases fit, evaluate and predict; and the progress of a run.

Owns the order of batches, executions, callbacks and save points. It must not compute: steps do.
"""
