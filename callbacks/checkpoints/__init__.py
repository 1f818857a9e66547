"""Callbacks that save the run or the model.

Own when to save, under which name, and what to delete again. How it is written is the business of run and model.
"""
