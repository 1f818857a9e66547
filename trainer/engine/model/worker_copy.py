"""The copy of a model in a worker, for scheduled functions: same code and configuration, with state on the servers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

from trainer.core.modules import FunctionalModule
from trainer.core.train_state import TrainState, shapes_of
from trainer.distribute.parameter_server.processes.wire import Resource
from trainer.distribute.parameter_server.served_model import ModelClient, ServedModel
from trainer.distribute.parameter_server.strategy import ParameterServerStrategy
from trainer.distribute.parameter_server.worker_strategy import WorkerStrategy
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.model_core import ModelCore, UserModel, core_of

_numbers = itertools.count()
_OF_THE_CHIEF = ("_core", "history")
_CONFIGURED = ("is_compiled", "loss", "metrics", "options", "rules", "trainable")


def as_resource(model: UserModel) -> Resource | None:
    """Returns the worker's resource for a model; None for a model made outside of a `ParameterServerStrategy`.

    The servers then hold the state, and the chief fetches it on the next access.
    """
    core = core_of(model)
    strategy, held = core.strategy, core.state
    if not isinstance(strategy, ParameterServerStrategy):
        if held.is_built:
            raise TypeError(f"The model {model.name!r} was made under {strategy!r}, and cannot be sent to "
                            "workers. Make it in the scope of the ParameterServerStrategy, and give it its weights by "
                            "`set_weights`.")
        return None
    served = strategy.served(held, core.module.embeddings)
    client = None
    if held.is_built:
        if held.version != served.version_of_chief:
            served.load(held.current)
        shapes = shapes_of(held.state_or_shapes)
        client = served.client(shapes)
        held.set_pending(shapes, functools.partial(_fetched, strategy, served, shapes))
        served.version_of_chief = held.version
    key = f"{served.key}, {served.generation}, {core.configuration.changes}"
    if served.key_of_copies not in (None, key):
        strategy.coordinator.release(served.key_of_copies)
    served.key_of_copies = key
    return Resource(key, _copier(model, client))


class SharedTrainStep:
    """The `train_step` of a model for the workers of `fit`, without its own state."""

    def __init__(self, model: UserModel):
        self._model = model
        self._key = f"train step {next(_numbers)}"  # unique, because the attributes may differ

    def __as_resource__(self) -> Resource:
        """Returns the worker's resource for the step."""
        copy = _copier(self._model, None)
        return Resource(self._key, lambda worker: copy(worker).train_step)


def _copier(model: UserModel, client: ModelClient | None) -> Callable[[Any], UserModel]:
    """Returns a function that makes the copy of the model in a worker."""
    attributes = {name: value for name, value in vars(model).items() if name not in _OF_THE_CHIEF}
    core = core_of(model)
    configured = {name: getattr(core.configuration, name) for name in _CONFIGURED}
    return functools.partial(_in_worker, type(model), attributes, core.defaults, core.module, configured, client)


def _fetched(strategy: ParameterServerStrategy, served: ServedModel, shapes: TrainState) -> TrainState:
    strategy.coordinator.wait_until_idle()
    return served.fetch(shapes, strategy.place_state)[0]


def _in_worker(
    kind: type[UserModel], attributes: dict[str, Any], defaults: type, module: FunctionalModule,
    configured: dict[str, Any], client: ModelClient | None, worker: Any,
) -> UserModel:
    model = object.__new__(kind)
    vars(model).update(attributes)
    strategy: WorkerStrategy = worker.resource_or_make("strategy", WorkerStrategy)
    configuration = Configuration()
    vars(configuration).update(configured)
    core = model._core = ModelCore(model, defaults, module, strategy, 0, configuration)
    core.current_run = _OfTheChief()  # type: ignore[assignment]
    core.state = _ServedState(strategy, client)  # type: ignore[assignment]
    return model


class _OfTheChief:
    """Stands for the members of a model that exist only on the chief."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("A scheduled function cannot use this method of a model, such as `fit`, `evaluate`, "
                           "`compile` or `get_weights`, which are for the chief. In the function, use `model(x)`, "
                           "`model.apply`, `model.state` and `strategy.run`.")


class _ServedState(_OfTheChief):
    """Replaces `StateHolder` in a worker: each read pulls the parameters."""

    def __init__(self, strategy: WorkerStrategy, client: ModelClient | None):
        self._strategy, self._client = strategy, client

    @property
    def is_built(self) -> bool:
        """Whether there are weights."""
        return self._client is not None

    def borrow(self) -> TrainState:
        """Returns the state from the servers."""
        if self._client is None:
            raise RuntimeError("The model has no weights yet. Call `build(sample)` with some rows of inputs before "
                               "functions that use it are scheduled.")
        return self._strategy.pulled_state(self._client)

    current = property(borrow)

    def assign(self, state: TrainState) -> None:
        """Does nothing: `strategy.run` has sent the gradients, and the servers hold the state.

        Raises:
          RuntimeError: for a state that `strategy.run` has not returned.
        """
        if not self._strategy.is_pulled(state):
            raise RuntimeError("In a scheduled function, `model.state` can only be assigned what `strategy.run` has "
                               "just returned, as the servers make the updates. Assign other states on the chief.")
