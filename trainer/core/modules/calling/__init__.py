"""Calls of a module: the flags and random keys in its signature, and checks of its layers in each phase.

Owns the names of flags and of random keys. It must know neither parameters nor state.
"""
