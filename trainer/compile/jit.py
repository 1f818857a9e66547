"""Compiles. The only file that calls `jax.jit` or `shard_map`, and the only file that donates.

Owns no knowledge of what it compiles: a phase of `fit`, a user's function for `strategy.run`, or an initialisation.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.compile.compiler_options import CompilerOptions, options_of_one_run
from trainer.core.ambient.threads import in_caller_context
from trainer.core.types import PyTree


def compiled(
    function: Callable[..., Any], out_shardings: Any = None, donate: Sequence[int] = (),
    compiler_options: CompilerOptions | None = None,
) -> Any:
    """Returns `function` compiled; inside another compiled function, all calls share its trace.

    Args:
      function: a pure function of arrays.
      out_shardings: where the outputs are put, a prefix of their tree; None leaves it to the compiler.
      donate: the numbers of the arguments whose buffers the outputs may take.
      compiler_options: XLA's options, of a function that no other compiled function calls.
    """
    options = {} if out_shardings is None else {"out_shardings": out_shardings}
    return jax.jit(
        function, donate_argnums=tuple(donate), compiler_options=dict(compiler_options or {}) or None, **options)


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, axes: Collection[str], in_specs: Any, out_specs: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Returns a function, to be called in a compiled function, that runs `function` once for each place along mesh
    axes.

    Other axes of the mesh are left to the compiler.

    Args:
      function: what one place computes, from its part of the arguments.
      mesh: the devices.
      axes: the axes of the mesh.
      in_specs: how each argument is split over these axes, a prefix of their trees.
      out_specs: returns how the outputs are put together, likewise, from the tree of one place's outputs.
    """
    # Without the check of varying axes: with it, gradients of replicated parameters come summed already, and Flax's
    # recurrent layers fail in their scan.
    over_mesh = functools.partial(
        jax.shard_map, function, mesh=mesh, in_specs=in_specs, axis_names=set(axes), check_vma=False)

    def call(*args: Any) -> Any:
        outputs = jax.eval_shape(over_mesh(out_specs=jax.sharding.PartitionSpec()), *_shapes(args))
        return over_mesh(out_specs=out_specs(outputs))(*args)

    return call


def _shapes(tree: PyTree) -> Any:
    # Bare, as a memory space would be a part of the type.
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


# XLA compiles one program on all cores. Two at once would end no sooner, and their memory at the peak is that of both.
_COMPILER = threading.Lock()


def compile_lowered(lowered: Any, options: CompilerOptions | None = None) -> Any:
    """Returns the executable of a `jax.stages.Lowered`, after those that other threads are compiling.

    Args:
      lowered: the program.
      options: XLA's options; see `compiler_options.py`.
    """
    with _COMPILER:
        return lowered.compile(compiler_options=options or None)


def begin_compiling(lowered: Any, options: CompilerOptions | None = None) -> concurrent.futures.Future[Any]:
    """Returns what will have the result of `compile_lowered`, which a thread calls."""
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="trainer-compile")
    executable = pool.submit(in_caller_context(compile_lowered), lowered, options)
    pool.shutdown(wait=False)  # the thread ends with its work
    return executable


def compiling(
    function: Callable[..., Any], *args: Any, out_shardings: Any = None, options: CompilerOptions | None = None
) -> Callable[..., Any]:
    """Begins to compile `function` in a thread, while the caller traces.

    Args:
      function: a pure function of arrays.
      *args: arguments of the shapes that it will be called with.
      out_shardings: as in `compiled`.
      options: XLA's options.

    Returns:
      The function compiled. Its first call waits until it is.
    """
    if is_jit_disabled():
        return lambda *args: jax.device_put(function(*args), out_shardings)
    executable = begin_compiling(compiled(function, out_shardings).lower(*args), options)
    return lambda *args: executable.result()(*args)


def init_placed(init: Callable[..., Any], shardings: Callable[[Any], Any], *args: Any) -> tuple[Any, Callable[[], Any]]:
    """Begins to compile `init`, each leaf in place and in a buffer of its own: no device holds more than its part.

    Args:
      init: a pure function.
      shardings: returns where each leaf of the result goes, from a tree of their shapes.
      *args: the arguments of `init`.

    Returns:
      The shapes of the result, and a function that returns `init(*args)`.
    """
    shapes = jax.eval_shape(init, *_shapes(args))
    placed = shardings(shapes)
    device = next(iter(jax.tree.leaves(placed)[0].device_set))
    compiled_init = compiling(init, *args, out_shardings=placed, options=options_of_one_run(device))

    def make() -> Any:
        with jax.transfer_guard("allow"):  # of `args`, once: a guard is set to watch over loops
            return compiled_init(*args)

    return shapes, make


def copy_buffers(tree: PyTree) -> Any:
    """Returns a copy of a tree of arrays: no leaf shares a buffer with another, or with the original."""
    leaves, treedef = jax.tree.flatten(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return jax.device_put(tree, may_alias=False)  # without a program
    return jax.tree.unflatten(treedef, _copy_to(tuple(leaf.sharding for leaf in leaves))(leaves))


@functools.lru_cache(maxsize=64)
def _copy_to(shardings: tuple[Any, ...]) -> Any:
    return jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves], out_shardings=list(shardings))


_config: Any = jax.config  # whose attributes JAX declares at run time


def is_jit_disabled() -> bool:
    """Returns whether JAX is to run everything operation by operation (`jax.disable_jit`)."""
    return bool(_config.jax_disable_jit)


def are_floats_debugged() -> bool:
    """Returns whether JAX is to raise for results that are not finite (`jax.debug_nans`, `jax.debug_infs`)."""
    return bool(_config.jax_debug_nans or _config.jax_debug_infs)


def run_once(function: Callable[..., Any], *args: Any, eager: bool) -> Any:
    """Returns `function(*args)`, compiled for this one call unless it is to run eagerly."""
    return (function if eager else jax.jit(function))(*args)
