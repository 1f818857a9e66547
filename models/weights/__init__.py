"""Weights that the world already has: files of Keras, and what their models expect of images."""
