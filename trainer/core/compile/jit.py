"""Compiles functions. The only file that calls `jax.jit` or `shard_map`, and the only file that donates.

It does not know the function: a phase of `fit`, a user's function for `strategy.run`, or an initialization.
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

from trainer.core.ambient.jax_options import jax_config
from trainer.core.ambient.threads import in_caller_context
from trainer.core.compile.compiler_options import CompilerOptions, options_of_one_run
from trainer.core.types import PyTree


def compiled(
    function: Callable[..., Any], out_shardings: Any = None, donate: Sequence[int] = (),
    compiler_options: CompilerOptions | None = None,
) -> Any:
    """Returns `function` compiled. Inside another compiled function, all calls share its trace.

    Args:
      function: a pure function of arrays.
      out_shardings: shardings of the outputs, a prefix of their tree; None leaves them to the compiler.
      donate: indices of the arguments whose buffers the outputs may reuse.
      compiler_options: XLA's options, for a function that no other compiled function calls.
    """
    options = {} if out_shardings is None else {"out_shardings": out_shardings}
    return jax.jit(
        function, donate_argnums=tuple(donate), compiler_options=dict(compiler_options or {}) or None, **options)


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, axes: Collection[str], in_specs: Any, out_specs: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Returns a function that runs `function` on each shard along mesh axes, for calls in a compiled function.

    Other axes of the mesh are left to the compiler.

    Args:
      function: function of a shard of the arguments.
      mesh: the devices.
      axes: axes of the mesh.
      in_specs: partition specs of the arguments over these axes, a prefix of their trees.
      out_specs: returns the partition specs of the outputs, a prefix of their tree, from the tree of a shard's outputs.
    """
    # No check of varying axes: with it, gradients of replicated parameters are already summed, and Flax's recurrent
    # layers fail in their scan.
    over_mesh = functools.partial(
        jax.shard_map, function, mesh=mesh, in_specs=in_specs, axis_names=set(axes), check_vma=False)

    def call(*args: Any) -> Any:
        outputs = jax.eval_shape(over_mesh(out_specs=jax.sharding.PartitionSpec()), *_shapes(args))
        return over_mesh(out_specs=out_specs(outputs))(*args)

    return call


def on_each_part(function: Callable[..., Any], axes: Collection[str], specs: Any) -> Callable[..., Any]:
    """Returns a function, for calls in a function of `on_each_device`, that runs on each shard along further axes.

    XLA does not divide a collective over the axes that are left to it: it gathers the operands whole.

    Args:
      function: function of a shard of an argument; its result is split in the same way.
      axes: the other axes of the mesh.
      specs: partition specs of the argument over these axes, a prefix of its tree.
    """
    return jax.shard_map(function, in_specs=(specs,), out_specs=specs, axis_names=set(axes), check_vma=False)


def _shapes(tree: PyTree) -> Any:
    # Plain shapes, because a memory space would be part of the type.
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


# XLA compiles a program on all cores. Two compilations at once would be no faster, and add up their peak memory.
_COMPILER = threading.Lock()


def compile_lowered(lowered: Any, options: CompilerOptions | None = None) -> Any:
    """Returns the executable of a `jax.stages.Lowered`. Threads compile one program at a time.

    Args:
      lowered: the program.
      options: XLA's options; see `compiler_options.py`.
    """
    with _COMPILER:
        return lowered.compile(compiler_options=options or None)


def begin_compiling(lowered: jax.stages.Lowered,
                    options: CompilerOptions | None = None) -> concurrent.futures.Future[Any]:
    """Returns a future for the result of `compile_lowered` in a new thread."""
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
      *args: arguments with the shapes of later calls.
      out_shardings: as in `compiled`.
      options: XLA's options.

    Returns:
      The compiled function. Its first call waits for the compilation.
    """
    if jax_config.jax_disable_jit:
        return lambda *args: jax.device_put(function(*args), out_shardings)
    executable = begin_compiling(compiled(function, out_shardings).lower(*args), options)
    return lambda *args: executable.result()(*args)


def init_placed(init: Callable[..., Any], shardings: Callable[[Any], Any], *args: Any) -> tuple[Any, Callable[[], Any]]:
    """Begins to compile `init`, with each leaf in its own buffer: no device holds more than its shard.

    Args:
      init: a pure function.
      shardings: returns the sharding of each leaf of the result, from a tree of shapes.
      *args: arguments of `init`.

    Returns:
      The shapes of the result, and a function that returns `init(*args)`.
    """
    shapes = jax.eval_shape(init, *_shapes(args))
    placed = shardings(shapes)
    device = next(iter(jax.tree.leaves(placed)[0].device_set))
    compiled_init = compiling(init, *args, out_shardings=placed, options=options_of_one_run(device))

    def make() -> Any:
        with jax.transfer_guard("allow"):  # for `args`, once: guards are meant for loops
            return compiled_init(*args)

    return shapes, make


def copy_buffers(tree: PyTree) -> Any:
    """Returns a copy of a tree of arrays. No leaf shares a buffer with another leaf, or with the original."""
    leaves, treedef = jax.tree.flatten(tree)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return jax.device_put(tree, may_alias=False)  # without a program
    return jax.tree.unflatten(treedef, _copy_to(tuple(leaf.sharding for leaf in leaves))(leaves))


@functools.lru_cache(maxsize=64)
def _copy_to(shardings: tuple[Any, ...]) -> Any:
    return jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves], out_shardings=list(shardings))


def run_once(function: Callable[..., Any], *args: Any, eager: bool) -> Any:
    """Returns `function(*args)`, compiled for this single call unless `eager`."""
    return (function if eager else jax.jit(function))(*args)
