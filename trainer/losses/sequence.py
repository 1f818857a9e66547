"""The loss of label sequences without alignment to the predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from trainer.core.types import ArrayLike
from trainer.losses.base import BuiltinLoss
from trainer.losses.shapes import as_float, check_arrays

_BLANK = 0


def ctc(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the negative log-likelihood of label sequences over all their alignments with the predictions.

    Args:
      y_true: labels, 1 or above, `(n, labels)`, padded with zeros at the end of each row.
      y_pred: logits, `(n, steps, classes)`. Class 0 is the blank.

    Returns:
      One value per row, `(n,)`.

    Raises:
      ValueError: if the shapes are different from the above.

    Source: Graves et al., "Connectionist Temporal Classification: Labelling Unsegmented Sequence Data with Recurrent
    Neural Networks", 2006. The computation is `optax.ctc_loss`.

    >>> round(ctc([[1]], [[[0.0, 0.0], [0.0, 0.0]]]).item(), 4)
    0.2877
    """
    y_true, y_pred = jnp.asarray(y_true).astype(jnp.int32), as_float(y_pred)
    _check_shapes(y_true, y_pred)
    lengths = jnp.sum(y_true != _BLANK, axis=-1, keepdims=True)
    is_padding = (jnp.arange(y_true.shape[1])[None] >= lengths).astype(y_pred.dtype)
    return optax.ctc_loss(y_pred, jnp.zeros(y_pred.shape[:2], y_pred.dtype), y_true, is_padding, blank_id=_BLANK)


def _check_shapes(y_true: jax.Array, y_pred: jax.Array) -> None:
    if len(y_true.shape) != 2 or len(y_pred.shape) != 3 or y_true.shape[0] != y_pred.shape[0]:
        raise ValueError("The loss 'ctc' needs labels of shape (batch, labels) and logits of shape (batch, steps, "
                         f"classes). Received: y_true.shape={tuple(y_true.shape)}, y_pred.shape={tuple(y_pred.shape)}.")


class CTC(BuiltinLoss):
    """Connectionist temporal classification of label sequences; see `ctc`, and `Loss` for the arguments.

    >>> round(float(CTC()([[1]], [[[0.0, 0.0], [0.0, 0.0]]])), 4)
    0.2877
    """

    function = staticmethod(ctc)
    float_labels = ()

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_arrays(y_true, y_pred)
        _check_shapes(y_true, y_pred)

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return self.function(y_true, y_pred)
