"""The weights and the layers of a model as objects with names, as Keras has them.

They hold no arrays: each reads and writes the training state of the model that it is of.
"""
