"""Losses, metrics and steps of generated training programs. Many look at the batch as a whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import trainer
from tests.support.generated_modules import VOCABULARY
from trainer import losses

CLASSES, VALUES = 3, 2
OUTPUTS = {"labels": CLASSES, "values": VALUES, "tokens": VOCABULARY}


# --- losses that are given to `compile` -------------------------------------------------------------------------------


def crossentropy_of_rows(y_true, y_pred):
    return optax.softmax_cross_entropy_with_integer_labels(y_pred, y_true.astype(jnp.int32))


class Jaccard(losses.Loss):
    """One minus the Jaccard index of all rows together."""

    def call(self, y_true, y_pred):
        y_true, y_pred = jax.nn.one_hot(y_true.astype(jnp.int32), y_pred.shape[-1]), nn.softmax(y_pred)
        both = (y_true * y_pred).sum()
        return 1 - both / (y_true.sum() + y_pred.sum() - both)


def dice_of_batch(y_true, y_pred):
    return losses.dice(nn.sigmoid(y_true), nn.sigmoid(y_pred))


def correlation(y_true, y_pred):
    """Returns 1 minus the correlation over the batch."""
    y_true, y_pred = y_true - y_true.mean(0), y_pred - y_pred.mean(0)
    norms = jnp.sqrt((jnp.square(y_true).sum() + 0.1) * (jnp.square(y_pred).sum() + 0.1))
    return 1 - (y_true * y_pred).sum() / norms


def ranking(y_true, y_pred):
    """Returns a loss over all pairs of rows that should be in the order of their targets."""
    wanted = y_true[:, None] - y_true[None]
    return nn.softplus(-wanted * (y_pred[:, None] - y_pred[None])).mean()


def crossentropy_of_tokens(y_true, y_pred):
    """Returns the mean over a batch's tokens, without padding: rows with more tokens weigh more."""
    mask = (y_true > 0).astype(jnp.float32)
    return (crossentropy_of_rows(y_true, y_pred) * mask).sum() / jnp.maximum(mask.sum(), 1)


def crossentropy_of_tokens_by_row(y_true, y_pred):
    mask = (y_true > 0).astype(jnp.float32)
    return (crossentropy_of_rows(y_true, y_pred) * mask).sum(-1) / jnp.maximum(mask.sum(-1), 1)


def sparse(**options):
    return lambda: losses.SparseCategoricalCrossentropy(from_logits=True, **options)


BY_ROW = {
    "labels": {"crossentropy": sparse(), "crossentropy_sum": sparse(reduction="sum"),
               "crossentropy_weighted": sparse(reduction="mean_with_sample_weight"),
               "function_by_row": lambda: crossentropy_of_rows},
    "values": {"mse": lambda: "mse", "huber": lambda: losses.Huber(0.5),
               "function_by_row": lambda: lambda y_true, y_pred: jnp.abs(jnp.tanh(y_pred - y_true)).mean(-1)},
    "tokens": {"crossentropy": sparse(ignore_class=0), "function_by_row": lambda: crossentropy_of_tokens_by_row},
}
OF_BATCH = {
    "labels": {"function_mean": lambda: lambda y_true, y_pred: crossentropy_of_rows(y_true, y_pred).mean(),
               "jaccard": Jaccard},
    "values": {"dice": lambda: dice_of_batch, "correlation": lambda: correlation, "ranking": lambda: ranking},
    "tokens": {"mean_of_tokens": lambda: crossentropy_of_tokens},
}


# --- compute_loss -----------------------------------------------------------------------------------------------------


class AddsSpread(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        deviation = jnp.sqrt(y_pred.var(0) + 0.01).mean()
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * deviation


class Contrasts(trainer.Model):
    """All pairs of rows: each is like itself alone."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        flat = y_pred.reshape(len(y_pred), -1)
        signs = 2 * jnp.eye(len(flat)) - 1
        return -nn.log_sigmoid(flat @ flat.T * signs / 10).sum(-1).mean()


class NormalizesAdvantages(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        advantages = x.reshape(len(x), -1).astype(jnp.float32).mean(-1)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 0.1)
        return 0.3 * (advantages * nn.log_softmax(y_pred)[..., 0].reshape(len(x), -1).mean(-1)).mean()


LOSS_OVERRIDES = {"adds_spread": AddsSpread, "contrasts": Contrasts, "normalizes_advantages": NormalizesAdvantages}


# --- train_step, and the other steps ----------------------------------------------------------------------------------


def gradients(model, state, x, y, sample_weight, params=None):
    """Returns the loss, its gradients at some parameters, the outputs and the new model state."""
    def loss_fn(params):
        y_pred, model_state = model.apply(params, state, x, training=True)
        loss = model.compute_loss(x, y, y_pred, sample_weight) + model.compute_penalties(params, model_state)
        return loss, (y_pred, model_state)

    params = state.params if params is None else params
    (loss, (y_pred, model_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return loss, grads, y_pred, model_state


class Clips(trainer.Model):
    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        loss, grads, y_pred, model_state = gradients(self, state, x, y, sample_weight)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, 0.2 / (norm + 1e-6)), grads)
        logs = {"loss": loss, "norm": norm, **self.compute_metrics(x, y, y_pred, sample_weight)}
        return logs, state.apply_gradients(grads, model_state=model_state)


class Skips(trainer.Model):
    """Leaves out the update of a batch, depending on its loss."""

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        loss, grads, _, model_state = gradients(self, state, x, y, sample_weight)
        is_skipped = jnp.sin(40 * loss) > 0  # for about half of the batches
        grads = jax.tree.map(lambda leaf: jnp.where(is_skipped, 0.0, leaf), grads)
        logs = {"loss": loss, "skipped": is_skipped.astype(jnp.float32)}
        return logs, state.apply_gradients(grads, model_state=model_state)


class Perturbs(trainer.Model):
    """Sharpness-aware minimization."""

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        _, grads, _, _ = gradients(self, state, x, y, sample_weight)
        scale = 0.05 / (optax.tree.norm(grads) + 0.1)
        away = jax.tree.map(lambda param, grad: param + scale * grad, state.params, grads)
        loss, grads, _, model_state = gradients(self, state, x, y, sample_weight, away)
        return {"loss": loss}, state.apply_gradients(grads, model_state=model_state)


class Mixes(trainer.Model):
    """Mixup: each row with another that is drawn by lot."""

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        other = jax.random.permutation(self.make_rng(state, "mixup"), len(x))
        share = jax.random.uniform(self.make_rng(state, "share"), (), minval=0.6, maxval=0.9)
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = share * x + (1 - share) * x[other]
        else:  # tokens: some of the other row's
            x = jnp.where(jax.random.uniform(self.make_rng(state, "cut"), x.shape) < share, x, x[other])
        loss, grads, y_pred, model_state = gradients(self, state, x, y, sample_weight)
        logs = {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}
        return logs, state.apply_gradients(grads, model_state=model_state)


class Logs(trainer.Model):
    """Logs of the batch as a whole, in every phase."""

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        loss, grads, y_pred, model_state = gradients(self, state, x, y, sample_weight)
        logs = {"loss": loss, "largest": jnp.abs(y_pred).max(), "rows": jnp.float32(len(x)),
                "norm": optax.tree.norm(grads), "deviation": y_pred.std()}
        return logs, state.apply_gradients(grads, model_state=model_state)

    def test_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        y_pred, _ = self.apply(state.params, state, x)
        return {"loss": self.compute_loss(x, y, y_pred, sample_weight), "largest": jnp.abs(y_pred).max(),
                "rows": jnp.float32(len(x))}

    def predict_step(self, state, batch):
        x, _, _ = trainer.unpack_x_y_sample_weight(batch)
        y_pred, _ = self.apply(state.params, state, x)
        return {"share": nn.softmax(y_pred, 0), "centered": y_pred - y_pred.mean(0)}


class Twice(trainer.Model):
    """Two updates in a step, the second by the first's parameters, and weights that are clipped by hand."""

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        loss, grads, _, model_state = gradients(self, state, x, y, sample_weight)
        state = state.apply_gradients(grads, model_state=model_state)
        second, grads, _, model_state = gradients(self, state, x[::-1], y[::-1],
                                                  None if sample_weight is None else sample_weight[::-1])
        state = state.apply_gradients(grads, model_state=model_state)
        limited = jax.tree.map(lambda leaf: jnp.clip(leaf, -0.5, 0.5), state.params)
        return {"loss": loss, "second": second}, state.replace(params=limited)


class Measures(trainer.Model):
    """Metric objects that the steps update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mean, self.deviation, self.peak = trainer.metrics.Mean(name="mean"), Deviation(), Peak()

    def _measured(self, y, y_pred):
        self.mean.update_state(jnp.abs(y_pred).mean(tuple(range(1, y_pred.ndim))))
        for metric in (self.deviation, self.peak):
            metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in (self.mean, self.deviation, self.peak)}

    def train_step(self, state, batch):
        x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
        loss, grads, y_pred, model_state = gradients(self, state, x, y, sample_weight)
        return {"loss": loss, **self._measured(y, y_pred)}, state.apply_gradients(grads, model_state=model_state)

    def test_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)
        return self._measured(y, self.apply(state.params, state, x)[0])


STEPS = {"default": None, "clips": Clips, "skips": Skips, "perturbs": Perturbs, "mixes": Mixes, "logs": Logs,
         "twice": Twice, "measures": Measures}


# --- metrics ----------------------------------------------------------------------------------------------------------


class Deviation(trainer.metrics.Metric):
    """The mean over batches of the outputs' deviation over a batch, which is no sum over rows."""

    def __init__(self, name="batch_deviation", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total, self.batches = (self.add_weight(shape=(), initializer="zeros", name=name)
                                    for name in ("total", "batches"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(y_pred.std(0).mean())
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


class Peak(trainer.metrics.Metric):
    """The largest distance of an output from the mean of its batch."""

    additive = False

    def __init__(self, name="peak", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(jnp.maximum(self.largest, jnp.abs(y_pred - y_pred.mean(0)).max()))

    def merge_variables(self, first, second):
        return [jnp.maximum(one, other) for one, other in zip(first, second, strict=True)]

    def result(self):
        return self.largest


def size_by_row(y_true, y_pred):
    return jnp.abs(y_pred).reshape(len(y_pred), -1).mean(-1)


METRICS = {
    "accuracy": lambda: "accuracy", "size_by_row": lambda: size_by_row,
    "deviation": Deviation, "peak": Peak, "r2": trainer.metrics.R2Score, "mae": lambda: "mae",
}
METRICS_OF = {"labels": ("accuracy", "size_by_row", "deviation", "peak"),
              "values": ("mae", "r2", "size_by_row", "deviation", "peak"),
              "tokens": ("accuracy", "deviation", "peak")}


def model_class(loss, step):
    """Returns a subclass of `Model` with an overridden `compute_loss`, or steps, or both."""
    bases = [kind for kind in (STEPS[step], LOSS_OVERRIDES.get(loss)) if kind is not None]
    return type("Generated", (*bases, trainer.Model), {})
