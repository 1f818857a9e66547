"""The weights and the layers of a model as named objects, as in Keras.

They hold no arrays: each reads and writes the training state of its model.
"""
