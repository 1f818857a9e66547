"""Helpers with Keras's names and numbers for preparing data: numpy alone, no model."""

from trainer.utils.arrays import normalize, pad_sequences, to_categorical

__all__ = ["normalize", "pad_sequences", "to_categorical"]
