"""Callbacks that save the run or the model.

Own the time and the name of each save, and the deletion of old saves. The run and the model write the data.
"""
