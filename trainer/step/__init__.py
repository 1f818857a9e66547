"""One step: the pure train, test and predict functions, what `compile` configures of them, and their compiled phase.

Owns everything that happens between a batch on the devices and a new state with logs. It must not read data, write
files, call callbacks or loop over batches.
"""
