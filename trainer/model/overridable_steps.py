"""What a step computes by default, as methods that a subclass of `Model` may override.

All of it is traced, and sees the whole batch. How steps run on a mesh is in `step/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trainer.core import replica_context
from trainer.core.precision import apply_with_policy, with_matmul_precision
from trainer.core.replica_context import context_outside, get_replica_context, in_replica_context
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.batches import Batch
from trainer.model.core.model_core import ModelCore
from trainer.step import loss_parts, step_metrics
from trainer.step.gradient_accumulation import accumulated


class OverridableSteps:
    """The methods of `Model` that say what a step computes."""

    name: str
    _core: ModelCore

    def sample_inputs(self, batch: Batch) -> Any:
        """Returns what the module is initialised on, from some rows of the first batch.

        Override it for a dict of modules: it then returns a dict of inputs by module name. A module with several inputs
        has a tuple or a dict of them there, as in `x`. What `build` is given comes as a batch without targets.

            def sample_inputs(self, batch):
                x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
                return {"encoder": x, "critic": (x, np.zeros((len(x), 8)))}
        """
        return unpack_x_y_sample_weight(batch)[0]

    def compute_loss(self, x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree) -> jax.Array:
        """Returns the loss of a batch, a scalar.

        Override it to add terms, or to compute a custom loss. It is called inside the step, with all rows of the batch
        on any number of devices, or with those of a microbatch:

            return super().compute_loss(x, x, y_pred, sample_weight)  # an autoencoder, with compile(loss="mse")
        """
        loss = self._core.configuration.loss
        if not loss.is_given and self._core.module.sows_losses:  # which are all of it, then
            return jnp.zeros((), jnp.float32)
        return loss.total(loss.values(y, y_pred, sample_weight))

    def compute_penalties(self, params: PyTree, model_state: PyTree) -> jax.Array:
        """Returns what belongs to the loss besides `compute_loss`: a float32 scalar.

        These are the penalties of `compile(regularizers=...)`, and what the module has sown into "losses". The default
        steps add it; a `train_step` of your own does so itself.

        Args:
          params: all parameters, by which the loss is differentiated.
          model_state: what `apply` returned.
        """
        self._core.configuration.penalties_are_used = True
        losses = [jnp.sum(loss).astype(jnp.float32) for loss in self._core.module.sown_losses(model_state)]
        penalty = self._core.configuration.options.penalty_of(params)
        return sum(losses, jnp.zeros((), jnp.float32) if penalty is None else penalty)

    def compute_metrics(self, x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree) -> dict[str, Any]:
        """Returns the logs of the compiled metrics for a batch, and the loss of each of several outputs."""
        loss, logs = self._core.configuration.loss, {}
        picks = bool(loss.per_output) and not loss.is_of(y_pred)  # as an overridden `compute_loss` may, of the outputs
        if loss.is_given and not picks and len(jax.tree.leaves(y_pred)) > 1:
            losses = loss.values(y, y_pred, sample_weight)
            if len(losses) > 1:
                logs = {f"{name}_loss": value for name, value in losses.items()}
        return {**logs, **self._core.configuration.metrics.values(y, y_pred, sample_weight)}

    def train_step(self, state: TrainState, batch: Batch) -> tuple[dict[str, Any], TrainState]:
        """Returns the logs and the state after one step on a batch.

        Override it to change what a step does. It must be pure, as it is compiled. On any number of devices it sees the
        whole batch: what it does with rows, gradients and logs is what it would do on one.

        Args:
          state: the state before the step.
          batch: what the data yielded; `trainer.unpack_x_y_sample_weight` splits it.

        Returns:
          `(logs, state)`. A log is a scalar, which is averaged over steps, weighted by their rows; or what
          `compute_metrics` returns.
        """
        def loss_and_outputs(
            params: Any, state: TrainState, batch: Batch
        ) -> tuple[jax.Array, tuple[Any, Any, list[Any]]]:
            x, y, sample_weight = unpack_x_y_sample_weight(batch)
            y_pred, model_state = self.apply(params, state, x, training=True)
            updated: list[Any] = []
            with step_metrics.metrics_of_transformed(updated):
                loss = self.compute_loss(x, y, y_pred, sample_weight)
            loss = _with_penalties(self, loss, params, model_state)
            return loss, (y_pred, model_state, updated)

        def compute(state: TrainState, batch: Batch) -> tuple[Any, Any, dict[str, Any]]:
            x, y, sample_weight = unpack_x_y_sample_weight(batch)
            gradient = jax.value_and_grad(loss_and_outputs, has_aux=True)
            (loss, (y_pred, model_state, updated)), grads = gradient(state.params, state, batch)
            step_metrics.add(updated)
            logs = {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}
            return (state.trainable(grads), loss), model_state, logs  # the loss is a mean over parts as gradients are

        microbatches = self._core.configuration.options.microbatches
        (grads, loss), model_state, logs = (
            compute(state, batch) if microbatches == 1 else accumulated(compute, state, batch, microbatches))
        tracked = {**logs, **step_metrics.results()}
        if not self._core.configuration.trainable:
            return tracked, state
        value_fn = None if microbatches > 1 else lambda params: loss_and_outputs(params, state, batch)[0]
        return tracked, state.apply_gradients(grads, model_state=model_state, value=loss, value_fn=value_fn)

    def test_step(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Returns the logs for a batch, without training. Like `train_step`, it must be pure."""
        return logs_without_update(self, state, batch, training=False)

    def predict_step(self, state: TrainState, batch: Batch) -> Any:
        """Returns the outputs for a batch. Like `train_step`, it must be pure."""
        x, _, _ = unpack_x_y_sample_weight(batch)
        return self.apply(state.params, state, x, training=False)[0]

    def apply(
        self, params: PyTree, state: TrainState, x: PyTree, *, module: str | None = None, training: bool = False
    ) -> tuple[Any, Any]:
        """Returns the module's outputs and the new model state; pure.

        Beside the state stands what the module has sown: `model_state["losses"]`, for example. `apply_gradients` leaves
        that out.

        Args:
          params: the parameters, only those of `module`, if it is given.
          state: what the model state, the seed and the step are taken from.
          x: the inputs.
          module: which module of a dict of modules.
          training: whether dropout drops, and BatchNorm takes the batch's statistics, unless it is frozen.
        """
        names: dict[str, Any] = {} if module is None else {"module": module}
        options = self._core.configuration.options
        apply: Callable[..., Any] = functools.partial(
            self._core.module.apply, training=training, batch_norm=options.batch_norm, remat=options.remat,
            compute_dtype=None if options.policy is None else options.policy.compute_dtype,
            is_frozen=options.is_frozen if self._core.configuration.trainable else lambda path: True,
            make_key=lambda stream: self.make_rng(state, stream), **names)
        context = get_replica_context() if in_replica_context() else context_outside(x)
        # A replica's share of the loss is the larger the more replicas there are: its gradients must not overflow
        # sooner for that.
        scale = None if state.loss_scale is None else state.loss_scale / context.num_replicas_in_sync
        with replica_context.enter(context), with_matmul_precision(options.matmul_precision):
            if options.policy is None:
                return apply(params, state.model_state, x)
            return apply_with_policy(options.policy, apply, params, state.model_state, x, scale)

    def make_rng(self, state: TrainState, stream: str) -> jax.Array:
        """Returns the key of a random stream for this step: the same on any number of devices."""
        return get_replica_context().random_key(state.seed, stream, state.step)


def logs_without_update(model: OverridableSteps, state: TrainState, batch: Batch, training: bool) -> dict[str, Any]:
    """Returns the logs for a batch, which the module computes as in training or as outside."""
    x, y, sample_weight = unpack_x_y_sample_weight(batch)
    y_pred, model_state = model.apply(state.params, state, x, training=training)
    with loss_parts.recorded() as parts:
        loss = model.compute_loss(x, y, y_pred, sample_weight)
    loss = _with_penalties(model, loss, state.params, model_state)
    with loss_parts.recorded() as parts_of_outputs:
        logs = {"loss": loss, **model.compute_metrics(x, y, y_pred, sample_weight)}
    return {**loss_parts.exact_over_batches(logs, parts, parts_of_outputs), **step_metrics.results()}


def _with_penalties(model: OverridableSteps, loss: jax.Array, params: PyTree, model_state: PyTree) -> jax.Array:
    if not model._core.configuration.options.regularizers and not model._core.module.sown_losses(model_state):
        return loss
    return loss + model.compute_penalties(params, model_state)
