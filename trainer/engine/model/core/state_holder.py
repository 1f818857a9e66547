"""The training state of a model: its creation, its placement, and the ownership of its buffers.

Steps donate these buffers. A state that a user holds is *borrowed*: the next train step works on a copy.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from trainer.core import errors, replica_context, trace_purity
from trainer.core.ambient.jax_options import jax_config
from trainer.core.compile.jit import copy_buffers, init_placed
from trainer.core.modules import FunctionalModule
from trainer.core.rng import stream_key
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState, initial_opt_state, initial_state, shapes_of
from trainer.core.types import PyTree
from trainer.data.sources.arrays import Batch
from trainer.distribute import Strategy
from trainer.distribute.placement.placement import free_to_move, to_host
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.step.output_checks import explain_inputs
from trainer.optimizers import Optimizer
from trainer.optimizers.attached_optimizer import AttachedOptimizer
from trainer.optimizers.named import NamedRules

INIT_ROWS = 8  # number of rows of the first batch for initialization and for the check of outputs


def first_rows(batch: Batch) -> Batch:
    """Returns the rows of a batch for initialization."""
    return jax.tree.map(lambda leaf: leaf[:INIT_ROWS], batch)


def _are_same(one: PyTree, other: PyTree) -> bool:
    """Returns whether two trees have the same arrays, and not only equal ones."""
    return all(map(operator.is_, jax.tree.leaves(one), jax.tree.leaves(other)))


def with_rules(state: TrainState, rules: Any) -> TrainState:
    """Returns the state with other rules of the same optimizers, and the counts that these rules keep."""
    opt_state = state.opt_state
    if isinstance(rules, NamedRules):
        opt_state = {name: rule.with_counts(opt_state[name]) for name, rule in rules.items()}
    elif rules is not None:
        opt_state = rules.with_counts(opt_state)
    return state.replace(optimizer=rules, opt_state=opt_state)


class StateHolder:
    """Holds the training state of a model. There is no state until the model is built.

    Args:
      owner: the model.
      module: the module of the weights.
      strategy: places the weights.
      seed: seed of the weights and of all other random streams.
      configuration: the optimizer and the dtypes of the weights.
      clock: returns the clock of the current run, which measures the wait for pending weights.

    Attributes:
      seed: see above; after loading, the seed of the loaded state.
      inputs: the input shapes of the initialization; None before.
      shows_averages: whether `shown` has the moving averages as weights.
      version: changes with each change of the state.
      calls: the running methods that use the state: their threads, names, and whether they train.
    """

    def __init__(self, owner: object, module: FunctionalModule, strategy: Strategy, seed: int,
                 configuration: Configuration, clock: Callable[[], Timing]):
        self.seed = seed
        self.inputs: Any = None
        self.shows_averages = False
        self._shown: TrainState | None = None
        self._owner = owner
        self._module = module
        self._strategy = strategy
        self._configuration = configuration
        self._clock = clock
        self._state: TrainState | None = None
        self._making: tuple[TrainState, Callable[[], TrainState]] | None = None  # shapes, wait function
        self._is_borrowed = False
        self.version = 0
        self.calls: list[tuple[threading.Thread, str, bool]] = []

    @property
    def is_built(self) -> bool:
        """Whether there are weights, or weights are pending."""
        return self._making is not None or self._state is not None

    def exchange_module(self, module: FunctionalModule) -> None:
        """Replaces the module of a model without weights; raises RuntimeError if there are weights."""
        if self.is_built:
            raise RuntimeError("The model is built: layers cannot be added or removed. Make another model, such as "
                               "`Sequential([*(layer.module for layer in model.layers), nn.Dense(10)])`, and give its "
                               "layers the weights: `other.layers[0].set_weights(model.layers[0].get_weights())`.")
        self._module = module

    # --- making ----------------------------------------------------------------------------------------------------

    def build(self, inputs: PyTree, initial_values: PyTree = None) -> None:
        """Makes the weights from inputs in the form of `Model.sample_inputs`.

        Args:
          inputs: the inputs, or their shapes.
          initial_values: as for `FunctionalModule.init`; None for the values that the module holds.
        """
        with self.building(inputs, initial_values):
            pass
        _ = self.current  # waits for the weights

    @contextlib.contextmanager
    def building(self, inputs: PyTree, initial_values: PyTree = None) -> Iterator[TrainState]:
        """Makes the weights while the block runs. Yields their shapes; the first access after the block waits."""
        if self._strategy.is_described:
            raise ValueError(f"The devices of {self._strategy!r} are described only: no weights can be placed there. "
                             "Use `strategy.plan(model, sample)`, or a strategy over devices of this machine.")
        spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), inputs)
        make: Callable[..., TrainState] = self._make
        drawn_by: list[Any] = [np.uint32(self.seed)]
        if not self._strategy.is_on_cpu:  # XLA compiles draws from a constant key for GPUs in half the time
            make, drawn_by = functools.partial(make, *drawn_by), []
        if initial_values is None:
            initial_values = free_to_move(self._module.initial_values)
        making = init_placed(make, self._strategy.state_shardings, *drawn_by, inputs, initial_values)
        if spec != self.inputs:
            self._configuration.forget_phases()  # they are for weights of other shapes
        self.inputs = spec
        yield making[0]
        self.set_pending(*making)

    def shapes(self, inputs: PyTree = None) -> TrainState:
        """Returns the shapes of the state without allocation; for `inputs`, if given."""
        if inputs is None:
            return shapes_of(self.state_or_shapes)
        return jax.eval_shape(self._make, np.uint32(self.seed), inputs, self._module.initial_values)

    def start_training_again(self) -> None:
        """Gives existing weights the dtypes and a new optimizer state of the configuration."""
        configuration, strategy = self._configuration, self._strategy

        def started(state: TrainState) -> TrainState:
            state = strategy.on_devices(state)
            params = configuration.options.stored(state.params)
            return state.replace(params=params, opt_state=initial_opt_state(configuration.rules, params))

        state = self._finished()
        if state is not None:
            state = state.replace(optimizer=configuration.rules, opt_state=None)
            self.set(init_placed(started, strategy.state_shardings, state)[1]())
            self._is_borrowed = False

    def start_unused_optimizers_again(self) -> None:
        """Lets unused optimizers that keep first parameters, such as DoG, or averages begin with the current ones."""
        state = self.current
        named = isinstance(state.optimizer, Mapping)
        parts = {name: (rule, state.opt_state[name], state.params[name]) for name, rule in state.optimizer.items()
                 } if named else {None: (state.optimizer, state.opt_state, state.params)}
        unused = [name for name, (rule, opt_state, params) in parts.items() if rule is not None
                  and int(opt_state.count) == 0
                  and (rule.keeps_averages(opt_state) or rule.reads_params_in_init(shapes_of(params)))]

        def started(state: TrainState) -> TrainState:
            state = self._strategy.on_devices(state)
            first = initial_opt_state(state.optimizer, state.params)
            if not named:
                return state.replace(opt_state=state.opt_state._replace(inner=first.inner, average=first.average))
            return state.replace(opt_state={
                name: part._replace(inner=first[name].inner, average=first[name].average) if name in unused else part
                for name, part in state.opt_state.items()})

        if unused:
            self.set(init_placed(started, self._strategy.state_shardings, state)[1](), is_borrowed=True)

    def take_over_rules(self) -> None:
        """Adopts changed rules of the same optimizers from the configuration, and keeps their state."""
        rules, state = self._configuration.rules, self._finished()
        if state is None:
            return
        self.set(self._strategy.place_state(with_rules(state, rules)))

    def _make(self, seed: jax.Array, inputs: PyTree, initial_values: PyTree) -> TrainState:
        try:
            with replica_context.enter(replica_context.context_outside(inputs)):
                params, model_state, _ = self._module.init(stream_key(seed, "params"), inputs, initial_values)
        except Exception as error:
            raise explain_inputs(inputs, error, self._module.input_names) from error
        configuration = self._configuration
        self._module.check_params(params)
        params = configuration.options.stored(params)
        configuration.check_weights(params, model_state)
        return initial_state(params, model_state, configuration.rules, seed, self._module.layouts)

    # --- reading and replacing -------------------------------------------------------------------------------------

    @property
    def state_or_shapes(self) -> TrainState:
        """The state for reading only, or the shapes of a pending state: enough to trace and compile a step."""
        return self.current if self._making is None else self._making[0]

    @property
    def current(self) -> TrainState:
        """The state, for reading only: the next train step may reuse its buffers."""
        trace_purity.check_may_read(
            self, self._owner, "the state of a model", "In a step of the model, use its argument `state`; penalties of "
            "weights go into `compile(regularizers=...)`. Pass `model.state` as an argument of `run`, and use that "
            "there.")
        state = self._finished()
        if state is None:
            raise RuntimeError("The model has no weights yet. Call `build(sample)` with some rows of inputs, or `fit`.")
        return state

    @property
    def shown(self) -> TrainState:
        """The state whose weights users and callbacks read and save: with averages if `shows_averages`."""
        if self._shown is not None:
            return self._shown
        return self.evaluated if self.shows_averages else self.current

    @contextlib.contextmanager
    def showing_evaluated(self) -> Iterator[None]:
        """Lets `shown` be the state of `evaluated` in the block, which averages once and does not train."""
        before, self._shown = self._shown, self.evaluated
        try:
            yield
        finally:
            self._shown = before

    @property
    def evaluated(self) -> TrainState:
        """The state with the weights that `evaluate` and `predict` use: with averages, if the model keeps them."""
        state = self.current
        return self._strategy.on_devices(state).averaged() if state.keeps_averages else state

    def borrow(self) -> TrainState:
        """Returns the state. Its arrays stay valid, because the next train step works on a copy."""
        state = self.current
        self._is_borrowed = True
        return state

    def take_for_donation(self) -> TrainState:
        """Returns the state in buffers without other owners."""
        state = self.current
        if jax_config.jax_debug_nans or jax_config.jax_debug_infs:
            return copy_buffers(state)  # the step may raise after it has run
        if self._is_borrowed:
            state = copy_buffers(state)
            self.set(state)
            self._is_borrowed = False
        return state

    def set(self, state: TrainState, is_borrowed: bool = False) -> None:
        """Sets the state; `is_borrowed` if new arrays have other owners."""
        self._state, self._making = state, None
        self._is_borrowed |= is_borrowed
        self.version += 1

    def set_pending(self, shapes: TrainState, wait: Callable[[], TrainState]) -> None:
        """Sets a state that is still being computed. The first access waits for it."""
        self._making, self._is_borrowed = (shapes, wait), False
        self.version += 1

    def conflict(self, call: str, other: str, thread: threading.Thread, other_trains: bool) -> RuntimeError:
        """Returns the error of a call that another call, in another thread, excludes."""
        name = getattr(self._owner, "name", type(self._owner).__name__)
        why = "and its steps reuse the memory of the weights" if other_trains else (
            "whose weights would change and lose their memory meanwhile")
        return RuntimeError(
            f"The model {name!r} is used by two threads: `{call}` was called in {threading.current_thread().name!r}, "
            f"while `{other}` runs in {thread.name!r}, {why}. Call one after the other, for example by a callback of "
            f"`fit`, or make a model for each. {errors.see('two-threads')}")

    def check_is_not_trained_by_others(self, what: str) -> None:
        """Raises RuntimeError if another thread trains, whose step would undo a change; `what` names it."""
        for thread, other, trains in list(self.calls):
            if trains and thread is not threading.current_thread():
                raise self.conflict(what, other, thread, trains)

    def assign(self, state: TrainState) -> None:
        """Checks a user's state, places it and makes it the model's state.

        With other parameters and the present optimizer state, unused optimizers begin with these parameters.

        Raises:
          RuntimeError: if another thread trains.
          ValueError: if its structure, a shape or a dtype differs.
          TypeError: if it is not a `TrainState`, or is being traced.
        """
        if not isinstance(state, TrainState):
            kind = f"{type(state).__module__}.{type(state).__name__}".removeprefix("builtins.")
            raise TypeError("`state` must be a TrainState of the trainer, as `model.state` or a custom step returns it"
                            f". Received: a value of type {kind}. To set weights: "
                            "`model.state = model.state.replace(params=params)`.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
            raise TypeError("`state` was assigned in a function that is being compiled, where a state is no value yet. "
                            "Return the new state from the step, and assign it outside: "
                            "`model.state = strategy.run(step, ...)`.")
        self.check_is_not_trained_by_others("state")
        present = self.current
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(present)
        if structure != jax.tree.structure(state):
            raise ValueError("`state` has another structure than the model's state. Change the present one with "
                             "`model.state.replace(...)`.")
        placed = self._strategy.place_state(state)
        for (path, leaf), old in zip(jax.tree.leaves_with_path(placed), jax.tree.leaves(present), strict=True):
            if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
                is_replicated = leaf.shape[1:] == old.shape and leaf.ndim > old.ndim
                hint = (" The strategy places the state on all devices: leave `flax.jax_utils.replicate` out."
                        if is_replicated else "")
                raise ValueError(f"`state{jax.tree_util.keystr(path)}` must be an {errors.describe(old)}. "
                                 f"Received: an {errors.describe(leaf)}.{hint}")
        self.set(placed, is_borrowed=True)
        if _are_same(present.opt_state, state.opt_state) and not _are_same(present.params, state.params):
            self.start_unused_optimizers_again()

    def load(self, state: TrainState) -> None:
        """Assigns a state, and adopts its seed for all other draws, such as the order of rows."""
        self.assign(state)
        self.seed = int(state.seed)

    def adopt_averages(self) -> None:
        """Replaces the weights with the averages kept by `ema_decay` or an averaging optimizer."""
        self.assign(self._strategy.on_devices(self.current).with_averages_adopted())

    def attached_optimizer(self) -> AttachedOptimizer | dict[str, AttachedOptimizer] | None:
        """Returns the optimizer with its learning rate in this state; a dict of optimizers for named modules."""
        rules = self._configuration.rules
        if isinstance(rules, NamedRules):
            return {name: self._attached(rule.optimizer, name) for name, rule in rules.items()}
        return None if rules is None else self._attached(rules.optimizer, None)

    def end_fit(self) -> None:
        """Shows the weights again, and copies the trained weights into the user's own NNX module."""
        self.shows_averages = False
        if self.is_built and any(self._module.variable_identities()):
            # A single device's copy: the user's eager calls run on a single device.
            state = self._strategy.on_devices(self.current)
            params, model_state = jax.tree.map(
                lambda leaf: leaf.addressable_data(0) if leaf.is_fully_replicated else to_host(leaf),
                (state.params, state.model_state))
            self._module.absorb(params, model_state)

    def _attached(self, optimizer: Optimizer, name: str | None) -> AttachedOptimizer:
        def read() -> Any:
            state = self._finished()
            opt_state = None if state is None else state.opt_state
            return opt_state if name is None or opt_state is None else opt_state[name]

        def write(opt_state: Any) -> None:
            self.check_is_not_trained_by_others("optimizer")
            state = self.current
            self.set(state.replace(opt_state=opt_state if name is None else {**state.opt_state, name: opt_state}))

        return AttachedOptimizer(optimizer, read, write)

    def _finished(self) -> TrainState | None:
        """Returns the state, after waiting for a pending state; None without a state."""
        if self._making is not None:
            (_, wait), self._making = self._making, None
            with self._clock().compile:
                self._state = wait()
        return self._state
