"""A single step: the pure train, test and predict functions, their configuration, and their compiled phase.

Owns everything between a batch on the devices and a new state with logs. It must not read data, write files, call
callbacks or loop over batches.
"""
