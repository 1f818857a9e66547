"""How a module is called: what its signature asks for, and what its layers must do in training and outside of it.

Owns the names of flags and of random keys. It must know neither parameters nor state.
"""
