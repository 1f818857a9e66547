"""BuiltModel: a module, the strategy that it was made under, and its training state.

Owns how the state is made, where it lives, and who holds its buffers. What a step computes with it is in
`compiled_model.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from trainer.compile.jit import are_floats_debugged, copy_buffers, init_placed
from trainer.core import errors, trace_purity, tree_paths
from trainer.core.rng import stream_key
from trainer.core.timing import Timing
from trainer.core.train_state import TrainState, initial_opt_state, initial_state
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.sources.batches import as_batch
from trainer.distribute import get_strategy, has_strategy
from trainer.modules import as_functional
from trainer.optimizers.named import NamedRules
from trainer.optimizers.update_rule import UpdateRule
from trainer.step import output_checks
from trainer.step.compile_options import CompileOptions
from trainer.step.update_rules import check_names

INIT_ROWS = 8  # a model is initialised, and its outputs are checked, on so many rows of the first batch


def first_rows(batch: Any) -> Any:
    """Returns the rows of a batch that a model is initialised on."""
    return jax.tree.map(lambda leaf: leaf[:INIT_ROWS], batch)


class BuiltModel:
    """A Flax module with its state on a strategy's devices. See `Model`, which adds the rest."""

    def __init__(self, module: Any, *, seed: int = 0, name: str | None = None):
        self._functional = as_functional(module)
        output_checks.check_count("seed", seed, 0)
        self.name = name or self._functional.name
        self.strategy = get_strategy()
        self._seed = seed
        self._options = CompileOptions()
        self._rules: UpdateRule | NamedRules | None = None
        self._made_state: TrainState | None = None
        self._making: tuple[TrainState, Callable[[], TrainState]] | None = None  # the state's shapes, what waits for it
        self._state_is_lent = False
        self._sample_spec: Any = None
        self.timing = Timing()
        self.timing.end()

    def sample_inputs(self, batch: Any) -> Any:
        """Returns what the module is initialised on, from some rows of the first batch.

        Override it for a dict of modules: it then returns a dict of inputs by module name.
        """
        return unpack_x_y_sample_weight(batch)[0]

    @property
    def built(self) -> bool:
        """Whether the model has weights."""
        return self._making is not None or self._made_state is not None

    @property
    def state(self) -> TrainState:
        """The training state. Arrays read here stay valid: the next train step works on a copy.

        Raises:
          RuntimeError: if the model is not built.
          TypeError: in a function of `strategy.run`, which must be given the state as an argument.
        """
        state = self._require_built()
        self._state_is_lent = True
        return state

    @state.setter
    def state(self, value: TrainState) -> None:
        if not isinstance(value, TrainState):
            raise errors.wrong_type("state", value, "a TrainState, as `model.state` or a custom step returns it")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError("`state` was assigned in a function that is being compiled, where a state is no value yet. "
                            "Return the new state from the step, and assign it outside: "
                            "`model.state = strategy.run(step, ...)`.")
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(self._require_built())
        if structure != jax.tree.structure(value):
            raise ValueError("`state` has another structure than the model's state. Change the present one with "
                             "`model.state.replace(...)`.")
        placed = self.strategy.place_state(value)
        for (path, leaf), present in zip(
                jax.tree.leaves_with_path(placed), jax.tree.leaves(self._state), strict=True):
            if (leaf.shape, leaf.dtype) != (present.shape, present.dtype):
                raise ValueError(f"`state{jax.tree_util.keystr(path)}` must be an {errors.describe(present)}. "
                                 f"Received: an {errors.describe(leaf)}.")
        self._state, self._state_is_lent = placed, True

    def load_state(self, value: TrainState) -> None:
        """Sets the state, and takes over its seed for whatever else is drawn, such as the order of rows."""
        self.state = value
        self._seed = int(value.seed)

    def build(self, sample: Any) -> None:
        """Makes the weights from the shapes of a sample.

        Args:
          sample: some rows of inputs `x`: an array, a list of numbers, or a tuple or dict of these.

        Raises:
          ValueError: if `sample` holds no rows (a shape, for example), or the module cannot take such inputs.
        """
        self._build(as_batch(pack_x_y_sample_weight(sample)))

    def _build(self, batch: Any) -> None:
        self.build_on(self.sample_inputs(first_rows(batch)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.built:
            raise TypeError("A model with weights cannot be copied or pickled, as its arrays and programs are on "
                            "devices, and steps reuse the arrays. Make another model and give it `get_weights()`, or "
                            "use `model.save` and `trainer.load`.")
        return super().__reduce_ex__(protocol)

    @contextlib.contextmanager
    def _building(self, batch: Any) -> Iterator[TrainState]:
        """Begins to make the weights beside a block, which is given their shapes; who needs them after it waits."""
        with self._building_on(self.sample_inputs(first_rows(batch))) as shapes:
            yield shapes

    def build_on(self, inputs: Any) -> None:
        """Makes the weights from inputs as `sample_inputs` returns them."""
        with self._building_on(inputs):
            pass
        self._require_built()

    @contextlib.contextmanager
    def _building_on(self, inputs: Any) -> Iterator[TrainState]:
        self._sample_spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), inputs)
        making = init_placed(self._make_state, self.strategy.state_shardings, np.uint32(self._seed), inputs,
                             self._functional.initial_values)
        yield making[0]
        self._making, self._state_is_lent = making, False

    @property
    def _state(self) -> TrainState | None:
        # Whoever only traces or compiles takes `state_or_shapes`, so that the initialisation compiles meanwhile.
        if self._making is not None:
            (_, wait), self._making = self._making, None
            with self.timing.measure("compile"):
                self._made_state = wait()
        return self._made_state

    @_state.setter
    def _state(self, value: TrainState | None) -> None:
        self._made_state, self._making = value, None

    def _make_state(self, seed: jax.Array, inputs: Any, initial_values: Any) -> TrainState:
        try:
            params, model_state, _ = self._functional.init(stream_key(seed, "params"), inputs, initial_values)
        except Exception as error:
            raise ValueError(f"The module cannot take such `x`: {errors.describe(inputs)}. It raised "
                             f"{type(error).__name__}: {error}") from error
        params = self._options.stored(params)
        self._check_against_params(self._rules, self._options, params)
        return initial_state(params, model_state, self._rules, seed)

    def state_shapes(self, sample: Any = None) -> TrainState:
        """Returns the shapes of the state, allocating nothing.

        Args:
          sample: some rows of inputs `x`, which a model that is not built needs.

        Raises:
          ValueError: if the model is not built, and there is no sample.
        """
        if self.built:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.state_or_shapes)
        if sample is None:
            raise ValueError("The model is not built, so the shapes of its weights are not known. Pass `sample`, some "
                             "rows of inputs; nothing is allocated for it but its own rows.")
        inputs = self.sample_inputs(first_rows(as_batch(pack_x_y_sample_weight(sample))))
        return jax.eval_shape(self._make_state, np.uint32(self._seed), inputs, self._functional.initial_values)

    def _require_built(self) -> TrainState:
        trace_purity.check_may_read("the state of a model",
                                    "Pass `model.state` as an argument of `run`, and use that in the function.")
        if self._state is None:
            raise RuntimeError("The model has no weights yet. Call `build(sample)` with some rows of inputs, or `fit`.")
        return self._state

    def _check_strategy(self) -> None:
        if has_strategy() and get_strategy() is not self.strategy:
            raise ValueError(f"The model was made under {self.strategy!r}, but {get_strategy()!r} is in scope. "
                             "Make, compile and fit a model under one strategy.")

    def _check_against_params(self, rules: Any, options: CompileOptions, params: Any) -> None:
        check_names(rules, params, "top-level submodule")
        tree_paths.check_patterns("freeze", options.freeze, tree_paths.named_leaves(params))

    def _start_training_anew(self, state: TrainState) -> None:
        """Gives the weights that exist the dtypes and the optimizer state of the options and rules."""
        def started(state: TrainState) -> TrainState:
            state = self.strategy.on_devices(state)
            params = self._options.stored(state.params)
            return state.replace(params=params, opt_state=initial_opt_state(self._rules, params))

        state = state.replace(optimizer=self._rules, opt_state=None)
        self._state, self._state_is_lent = init_placed(started, self.strategy.state_shardings, state)[1](), False

    def _go_on_with(self, rules: Any) -> None:
        """Replaces the update rules by others of the same optimizers, whose state stays."""
        self._rules = rules
        if self._state is None:
            return
        opt_state = self._state.opt_state
        if isinstance(rules, NamedRules):
            opt_state = {name: rule.with_counts(opt_state[name]) for name, rule in rules.items()}
        elif rules is not None:
            opt_state = rules.with_counts(opt_state)
        self._state = self.strategy.place_state(self._state.replace(optimizer=rules, opt_state=opt_state))

    # --- what the loop asks for (see `loop.Trainee`) ---------------------------------------------------------------

    @property
    def state_or_shapes(self) -> TrainState:
        """The state for reading only, or its shapes while it is being made: enough to trace and to compile a step."""
        return self._require_built() if self._making is None else self._making[0]

    @property
    def current_state(self) -> TrainState:
        """The state, for reading only: the next train step may reuse its buffers."""
        return self._require_built()

    def take_state(self) -> TrainState:
        """Returns the state in buffers that nobody else holds, so that a step may donate them."""
        state = self._require_built()
        if are_floats_debugged():
            return copy_buffers(state)  # the step may raise when it has run
        if self._state_is_lent:
            state = self._state = copy_buffers(state)
            self._state_is_lent = False
        return state

    def keep_state(self, state: TrainState) -> None:
        """Makes `state`, which a step returned, the model's state."""
        self._state = state
