"""What every room builds on: errors, checks of arguments, names of leaves, the training state, random keys, clocks.

Imports nothing of the trainer but itself, and knows nothing of data, strategies or loops.
"""
