"""Loading Keras's weights into a model: which layer of a file is which layer of the model.

Owns the correspondence of names and layouts. The formats of files are in `keras_files.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from trainer.models.weights.keras_files import KerasLayer, keras_layers, read

# The arrays of a layer in the order in which Keras lists them.
_ORDER = ("depthwise_kernel", "pointwise_kernel", "kernel", "scale", "gamma", "bias", "mean", "var")
_AUTOMATIC = re.compile(r"(conv2d|batch_normalization|dense|separable_conv2d|depthwise_conv2d|normalization|"
                        r"layer_normalization)(?:_(\d+))?")
