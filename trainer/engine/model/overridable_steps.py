"""The default steps, as methods that a subclass of `Model` may override.

Steps are traced, and see the whole batch. `engine/step` runs them on a mesh.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import errors, overwritten, replica_context, tree_paths
from trainer.core.calls.entry_points import foreign_arguments
from trainer.core.precision import apply_with_policy, with_matmul_precision
from trainer.core.replica_context import context_outside, get_replica_context, in_replica_context
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import updated
from trainer.core.types import PyTree
from trainer.data import unpack_x_y_sample_weight
from trainer.data.sources.arrays import Batch
from trainer.engine.model.core.model_core import ModelCore
from trainer.engine.step import loss_terms, step_metrics
from trainer.engine.step.gradient_accumulation import accumulated
from trainer.engine.step.input_casts import multiplied_inputs
from trainer.losses.linear_logits import computed

_OF_STEPS = {"batch": "A step takes the state first: `strategy.run(model.train_step, args=(model.state, batch))`."}


class OverridableSteps:
    """The methods of `Model` that define the steps."""

    name: str
    _core: ModelCore

    def sample_inputs(self, batch: Batch) -> Any:
        """Returns the inputs for initialization, from some rows of the first batch.

        Override it for a dict of modules, to return a dict of inputs by module name. For a module with several inputs,
        the entry is a tuple or a dict of them, as in `x`. The sample of `build` is passed as a batch without targets.

            def sample_inputs(self, batch):
                x, y, sample_weight = trainer.unpack_x_y_sample_weight(batch)
                return {"encoder": x, "critic": (x, np.zeros((len(x), 8)))}
        """
        return unpack_x_y_sample_weight(batch)[0]

    def compute_loss(
        self, x: PyTree = None, y: PyTree = None, y_pred: PyTree = None, sample_weight: PyTree = None,
        training: bool = True,
    ) -> jax.Array:
        """Returns the loss of a batch, a scalar.

        Args:
          x: the inputs.
          y: the targets.
          y_pred: the model's outputs.
          sample_weight: the weights of the rows.
          training: whether the batch is trained on. An override may leave it out; the loss of `compile` ignores it.

        Override it to add terms, or to compute a custom loss. It is called inside the step, with all rows of the batch
        on any number of devices, or with all rows of a microbatch:

            return super().compute_loss(x, x, y_pred, sample_weight)  # an autoencoder, with compile(loss="mse")
        """
        loss = self._core.configuration.loss
        if not loss.is_given and self._core.module.sows_losses:  # the sown losses are the whole loss
            return jnp.zeros((), jnp.float32)
        return loss.total(loss.values(y, y_pred, sample_weight))

    def compute_penalties(self, params: PyTree, model_state: PyTree) -> jax.Array:
        """Returns the additions to the loss of `compute_loss`, a float32 scalar.

        These are the penalties of `compile(regularizers=...)`, and the losses that the module has sown into "losses".
        The default steps add them; a custom `train_step` must add them itself.

        Args:
          params: all parameters, with respect to which the loss is differentiated.
          model_state: the model state that `apply` returned.
        """
        self._core.configuration.penalties_are_used = True
        losses = [jnp.sum(loss).astype(jnp.float32) for loss in self._core.module.sown_losses(model_state)]
        penalty = self._core.configuration.options.penalty_of(overwritten.split(params)[0])
        return sum(losses, jnp.zeros((), jnp.float32) if penalty is None else penalty)

    def compute_metrics(self, x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree) -> dict[str, Any]:
        """Returns the logs of the compiled metrics for a batch, and the loss of each of several outputs."""
        loss, logs = self._core.configuration.loss, {}
        picks = bool(loss.per_output) and not loss.is_of(y_pred)  # an overridden `compute_loss` may select outputs
        if loss.is_given and not picks and len(jax.tree.leaves(y_pred)) > 1:
            losses = loss.values(y, y_pred, sample_weight)
            if len(losses) > 1:
                logs = {f"{name}_loss": value for name, value in losses.items()}
        return {**logs, **self._core.configuration.metrics.values(y, y_pred, sample_weight)}

    @foreign_arguments(_OF_STEPS)
    def train_step(self, state: TrainState, batch: Batch) -> tuple[dict[str, Any], TrainState]:
        """Returns the logs and the state after a step on a batch.

        Override it to customize the step. It must be pure, because it is compiled. On any number of devices it sees the
        whole batch: operations on rows, gradients and logs have the same results as on a single device.

        Args:
          state: the state before the step.
          batch: an element of the data; `trainer.unpack_x_y_sample_weight` splits it.

        Returns:
          `(logs, state)`. A log is a scalar, which is averaged over steps, weighted by their rows; or a result of
          `compute_metrics`.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"`state` must be the state of a model. Received: {errors.describe(state)}. "
                            f"{_OF_STEPS['batch']} `model.train_on_batch(x, y)` makes a step by itself.")

        def loss_and_outputs(
            params: Any, state: TrainState, batch: Batch
        ) -> tuple[jax.Array, tuple[Any, Any, list[Any]]]:
            x, y, sample_weight = unpack_x_y_sample_weight(batch)
            y_pred, model_state = self.apply(params, state, x, training=True)
            added: list[Any] = []
            with step_metrics.metrics_of_transformed(added):
                loss = _loss(self, x, y, y_pred, sample_weight, training=True)
            loss = _with_penalties(self, loss, params, model_state)
            return loss, (y_pred, model_state, added)

        def compute(state: TrainState, batch: Batch) -> tuple[Any, Any, dict[str, Any]]:
            x, y, sample_weight = unpack_x_y_sample_weight(batch)
            values = state.differentiable

            def of_trained(trained: Any) -> tuple[jax.Array, tuple[Any, Any, list[Any]]]:
                return loss_and_outputs(updated(values, trained), state, batch)

            # Not by frozen parameters, so that no gradient of them depends on XLA's removal of unused code.
            gradient = jax.value_and_grad(of_trained, has_aux=True)
            (loss, (y_pred, model_state, added)), grads = gradient(state.trainable(values))
            step_metrics.add(added)
            # A microbatch overwrites the collection for the next, as it passes model state on.
            grads, by_gradients = overwritten.split(grads)
            model_state = updated(model_state, by_gradients)
            logs = {"loss": loss, **self.compute_metrics(x, y, y_pred, sample_weight)}
            return (grads, loss), model_state, logs  # averaged over microbatches

        microbatches = self._core.configuration.options.microbatches
        (grads, loss), model_state, logs = (
            compute(state, batch) if microbatches == 1 else accumulated(compute, state, batch, microbatches))
        tracked = {**logs, **step_metrics.results()}
        if not self._core.configuration.trainable:
            return tracked, state
        grads = overwritten.joined(grads, overwritten.split(model_state)[1])
        value_fn = None if microbatches > 1 else lambda params: loss_and_outputs(params, state, batch)[0]
        return tracked, state.apply_gradients(grads, model_state=model_state, value=loss, value_fn=value_fn)

    @foreign_arguments(_OF_STEPS)
    def test_step(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Returns the logs for a batch, without training. Like `train_step`, it must be pure."""
        return logs_without_update(self, state, batch, training=False)

    @foreign_arguments(_OF_STEPS)
    def predict_step(self, state: TrainState, batch: Batch) -> Any:
        """Returns the outputs for a batch. Like `train_step`, it must be pure."""
        x, _, _ = unpack_x_y_sample_weight(batch)
        return computed(self.apply(state.params, state, x, training=False)[0])

    @foreign_arguments({
        "x": "It takes the parameters, the state and the inputs: `model.apply(state.params, state, x)`. Outside of a "
             "step, `model.predict(x)` returns outputs.",
        "rngs": "Leave it out: random keys come from the model's seed and the step.",
        "mutable": "Leave it out: `outputs, model_state = self.apply(...)` returns the new state.",
        **dict.fromkeys(("train", "deterministic", "use_running_average"), "Give `training`; the module's own flag "
                                                                           "follows it."),
    })
    def apply(
        self, params: PyTree, state: TrainState, x: PyTree, *, module: str | None = None,
        training: bool | None = None,
    ) -> tuple[Any, Any]:
        """Returns the module's outputs and the new model state; pure.

        The returned state also holds sown values, such as `model_state["losses"]`, which `apply_gradients` leaves out.

        Args:
          params: the parameters, or `state.differentiable`; with `module`, only the parameters of that module.
          state: provides the model state, the seed and the step.
          x: the inputs.
          module: the name of a module in a dict of modules.
          training: whether dropout is active, and BatchNorm uses the batch's statistics, unless it is frozen. None for
            False, of which a `train_step` is warned where it makes a difference.
        """
        self._core.configuration.training_arguments.add(training)
        params, given = overwritten.split(params)
        model_state = updated(state.model_state, given if module is None else {module: given})
        names: dict[str, Any] = {} if module is None else {"module": module}
        options = self._core.configuration.options
        call: Callable[..., Any] = functools.partial(
            self._core.module.apply, training=bool(training), batch_norm=options.batch_norm,
            compute_dtype=None if options.policy is None else options.policy.compute_dtype,
            is_frozen=options.is_frozen if self._core.configuration.trainable else lambda path: True, **names)
        apply = functools.partial(call, remat=options.remat, make_key=lambda stream: self.make_rng(state, stream))
        context = get_replica_context() if in_replica_context() else context_outside(x)
        # The loss scale is divided by the number of replicas: gradients of a replica's share of the loss grow with that
        # number, and must not overflow earlier.
        scale = None if state.loss_scale is None else state.loss_scale / context.num_replicas_in_sync
        with replica_context.enter(context), with_matmul_precision(options.matmul_precision):
            if options.policy is None:
                outputs, new_state = apply(params, model_state, x)
            else:
                casts = multiplied_inputs(
                    functools.partial(call, make_key=lambda stream: jax.random.key(0)), params, model_state, x,
                    options.policy, self._core.configuration.input_casts, (module, bool(training)))
                outputs, new_state = apply_with_policy(options.policy, apply, params, model_state, x, scale, casts)
        if training:
            before = tree_paths.named_leaves(model_state)
            context.new_averages.update(
                path for path, leaf in tree_paths.named_leaves(new_state).items()
                if path in before and leaf is not before[path] and self._core.module.is_batch_statistic(path))
        return outputs, new_state

    @foreign_arguments({"stream": "It takes the state first: `self.make_rng(state, \"dropout\")`."})
    def make_rng(self, state: TrainState, stream: str) -> jax.Array:
        """Returns the key of a random stream for this step, the same on any number of devices."""
        return get_replica_context().random_key(state.seed, stream, state.step)


def logs_without_update(model: OverridableSteps, state: TrainState, batch: Batch, training: bool) -> dict[str, Any]:
    """Returns the logs for a batch, computed with the module's `training` argument."""
    x, y, sample_weight = unpack_x_y_sample_weight(batch)
    y_pred, model_state = model.apply(state.params, state, x, training=training)
    with loss_terms.recorded() as terms:
        loss = _loss(model, x, y, y_pred, sample_weight, training)
    loss = _with_penalties(model, loss, state.params, model_state)
    with loss_terms.recorded() as terms_of_outputs:
        logs = {"loss": loss, **model.compute_metrics(x, y, y_pred, sample_weight)}
    return {**loss_terms.exact_over_batches(logs, terms, terms_of_outputs), **step_metrics.results()}


def _loss(
    model: OverridableSteps, x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree, training: bool
) -> jax.Array:
    """Returns the loss of `compute_loss`; as in Keras, an override need not take `training`.

    Raises:
      TypeError: if it has other arguments, or does not return a scalar.
    """
    signature = inspect.signature(model.compute_loss)
    takes = any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    options = {"training": training} if takes else {}
    try:
        signature.bind(x, y, y_pred, sample_weight, **options)
    except TypeError:
        raise TypeError("`compute_loss(self, x, y, y_pred, sample_weight, training=True)` is called with these "
                        f"arguments, of which it may leave out `training`. Received: compute_loss{signature}, without "
                        "`self`. A function of y and y_pred alone is a loss: `compile(loss=function)`.") from None
    loss = model.compute_loss(x, y, y_pred, sample_weight, **options)
    if loss is None or np.shape(loss) != ():
        raise TypeError(f"`compute_loss` must return the loss of the batch, a scalar. Received: "
                        f"{errors.describe(loss)}. {'End it with `return`' if loss is None else 'Take its mean'}.")
    return loss


def _with_penalties(model: OverridableSteps, loss: jax.Array, params: PyTree, model_state: PyTree) -> jax.Array:
    if not model._core.configuration.options.regularizers and not model._core.module.sown_losses(model_state):
        return loss
    return loss + model.compute_penalties(params, model_state)
