"""`Model` and `Sequential` (`model.py`): their core, steps, weights and files.

It imports nothing: the loop needs `model/core` before `Model` can be made.
"""
