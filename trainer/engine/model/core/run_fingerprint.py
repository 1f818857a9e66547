"""Descriptions to compare: of processes, before anything runs over their devices, and of a run that is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.callbacks import CallbackList
from trainer.core import replica_context
from trainer.core.compile.program_digest import program_digest
from trainer.core.train_state import TrainState, initial_opt_state
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.data.reader import Reader
from trainer.data.sources.arrays import Batch, unpack_x_y_sample_weight
from trainer.distribute.cluster import package_versions
from trainer.engine.model.core.configuration import Configuration
from trainer.optimizers.named import optimizer_kinds

_PROGRAM = "program, made by the code, the loss, the metrics, the optimizer and the communication"


def describe_model(state: TrainState, batch: Batch, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns comparable descriptions of a model and of the installed packages.

    Args:
      state: the state, or its shapes.
      batch: the first batch; only shapes and dtypes count.
      settings: the settings of `compile`.

    >>> state = TrainState(step=np.int32(0), params={"kernel": np.ones((2, 3))}, model_state={}, opt_state=(), seed=0)
    >>> describe_model(state, np.ones((4, 2), np.float32), {})["parameters"]  # doctest: +ELLIPSIS
    '1 array, 6 values (...)'
    """
    trees = {"parameters": state.params, "model state": state.model_state, "optimizer state": state.opt_state,
             "batch": batch}
    # Processes that met before JAX started have the same versions; a script may have started JAX itself.
    return {**package_versions(), **{name: _shapes(tree) for name, tree in trees.items()},
            **{name: str(value) for name, value in settings.items()}}


def describe_step(state: TrainState, program: str | None) -> dict[str, str]:
    """Returns comparable descriptions of a step and of its initial state, before it runs.

    Args:
      state: the state; only arrays that each process holds whole count.
      program: the text of the step before XLA compiles it; None for an eager step.

    >>> state = TrainState(step=np.int32(0), params={"kernel": np.ones(3)}, model_state={}, opt_state=(), seed=0)
    >>> describe_step(state, None)["values of the parameters"]
    '78ac6fa1'
    """
    trees = {"parameters": state.params, "model state": state.model_state, "optimizer state": state.opt_state}
    described = {f"values of the {name}": _values(tree) for name, tree in trees.items()}
    if program is not None:
        described[_PROGRAM] = _digest(program)
    return described


def describe_platform(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Returns the kind of the devices and the compiler, which together with the program determine the bits of a run.

    >>> describe_platform(jax.devices("cpu"))["kind of device"]
    'cpu'
    """
    compiler = f"jaxlib {package_versions()['jaxlib']}, {devices[0].client.platform_version}"
    return {"kind of device": ", ".join(sorted({device.device_kind for device in devices})),
            "compiler": " ".join(compiler.split())}


def run_settings(configuration: Configuration, seed: int) -> dict[str, Any]:
    """Returns the settings outside of the state that a resumed run must share, as plain data.

    Args:
      configuration: the arguments of `compile`.
      seed: the seed of the model.
    """
    options = configuration.options
    names = ("microbatches", "batch_norm", "ema_decay", "freeze", "skip_non_finite", "deterministic",
             "matmul_precision")
    return {"seed": seed, "optimizer": optimizer_kinds(configuration.rules), "loss": configuration.loss.kinds,
            "precision": None if options.policy is None else repr(options.policy),
            "regularizers": [[pattern, getattr(penalty, "__name__", None) or repr(penalty)]
                             for pattern, penalty in options.regularizers],
            **{name: getattr(options, name) for name in names}}


def program_digests(
    state: TrainState, batch: Batch, outputs: Callable[[TrainState, Batch], Any], compute_loss: Callable[..., Any],
    own_step: Callable[..., Any] | None,
) -> dict[str, str]:
    """Returns digests of the optimizer, the loss and `train_step`, to compare a resumed run.

    They distinguish functions or hyperparameters with the same name in `run_settings`. There is no digest of code that
    cannot be traced.

    Args:
      state: the shapes of the state.
      batch: the first batch; only shapes and dtypes count.
      outputs: returns the outputs of the module.
      compute_loss: the model's method.
      own_step: the user's own `train_step`, which may compute another loss; None without.
    """
    x, y, sample_weight = unpack_x_y_sample_weight(batch)

    def update(state: TrainState) -> Any:
        state = state.replace(opt_state=initial_opt_state(state.optimizer, state.params))
        grads, loss = state.differentiable, jnp.zeros(())
        return state.opt_state, state.apply_gradients(grads, value=loss, value_fn=lambda params: loss)

    def loss_and_gradient(outputs: Any) -> Any:
        return jax.value_and_grad(
            lambda outputs: compute_loss(x, y, outputs, sample_weight), allow_int=True)(outputs)

    computing: dict[str, Callable[[], str]] = {"the optimizer": lambda: program_digest(update, state)}
    if own_step is not None:
        computing["`train_step`, with the module,"] = lambda: program_digest(own_step, state, batch)
    else:
        computing["the loss"] = lambda: program_digest(loss_and_gradient, jax.eval_shape(outputs, state, batch))
    digests = {}
    with replica_context.enter(replica_context.context_outside(batch)):
        for name, compute in computing.items():
            # There may be no optimizer, or only the step uses it.
            with contextlib.suppress(Exception):
                digests[name] = compute()
    return digests


def describe_data(reader: Reader) -> dict[str, str]:
    """Returns the number of batches per epoch and, for arrays, the number of rows and a digest of the first batch."""
    rows = {} if reader.arrays is None else {
        "rows of the data": str(reader.arrays.rows), "first batch": reader.fingerprint()["first batch"][:8]}
    return {"batches of an epoch": str(reader.num_batches), **rows}


def describe_sets(readers: Mapping[str, Reader], what: str = "") -> dict[str, str]:
    """Returns comparable descriptions of data sets by name; `what`, their purpose, is appended to each entry."""
    described: dict[str, str] = {}
    for name, reader in readers.items():
        kind = " ".join(filter(None, (what, repr(name) if name else "")))
        described |= {f"{entry} ({kind})" if kind else entry: value for entry, value in describe_data(reader).items()}
    return described


def describe_training(
    reader: Reader, validation: Mapping[str, Reader], callbacks: CallbackList, **arguments: Any
) -> dict[str, str]:
    """Returns comparable descriptions of a run: its data, its callbacks and other arguments."""
    in_all = [type(callback).__name__ for callback in callbacks.callbacks if callback.runs_on == "all"]
    each_batch = [kind for kind in ("train", "test", "predict") if callbacks.wants_batch_hooks(kind)]
    return {**describe_data(reader), **describe_sets(validation, "validation"),
            'callbacks that run on "all"': ", ".join(in_all) or "none",
            "phases of which a callback sees each batch": ", ".join(each_batch) or "none",
            **{name: str(value) for name, value in arguments.items()}}


def _shapes(tree: PyTree) -> str:
    leaves = {name: (tuple(np.shape(leaf)), str(leaf.dtype)) for name, leaf in named_leaves(tree).items()}
    values = sum(int(np.prod(shape)) for shape, _ in leaves.values())
    digest = _digest(repr(sorted(leaves.items())))
    return f"{len(leaves)} array{'s' * (len(leaves) != 1)}, {values:,} values ({digest})"


def _values(tree: PyTree) -> str:
    checksum = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_replicated:
                continue
            leaf = leaf.addressable_data(0)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
        checksum = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, checksum)
    return f"{checksum:08x}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
