"""The base of all rooms: errors, argument checks, names of leaves, the training state, random keys, clocks.

Imports nothing else of the trainer, and knows nothing of data, strategies or loops.
"""
