"""Shared layers: Keras-compatible convolutions, classifier heads and attention."""
