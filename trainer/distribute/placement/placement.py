"""Data on devices, and back on the host: groups of batches, resident arrays, and padding of rows for the replicas.

Owns the names of the mesh axes that split rows, and the retry of a call for which device memory ran out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from trainer.core.calls.tracebacks import is_out_of_memory
from trainer.core.compile.jit import compiled
from trainer.core.errors import see
from trainer.core.types import ArrayLike, PyTree
from trainer.data.resident import ResidentBatches, gathered
from trainer.data.sources.arrays import (
    HostArrays,
    aligned_empty,
    assign,
    canonical_dtype,
    is_aligned,
    map_casting,
    shapes_key,
)
from trainer.data.sources.groups import ResumeToken
from trainer.distribute.placement.described import is_described
from trainer.distribute.placement.device_memory import let_go_of_unused

T = TypeVar("T")

DATA_FRACTION = 1 / 8  # of a device's memory, for the arrays of one dataset
SMALL_BYTES = 16 * 2**20  # of arrays that are padded, on the devices, to a shared length
_PADDED_BYTES = 2**20  # size of padded small arrays
REPLICA_AXIS = "replica"  # the mesh axis of every strategy that splits rows
SHARD_AXIS = "shard"  # a mesh axis that splits rows too, and the state by the shapes of its arrays
ROW_AXES = (REPLICA_AXIS, SHARD_AXIS)
REPLICATED = "replicated"  # an array that is whole on each device
_STATE_IS_LOST = ("The step had taken over the buffers of the model's state, which are gone. Load weights or a "
                  "checkpoint before the model is used again.")


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """A group of batches on the devices.

    Attributes:
      data: a stack, a tree of arrays `(batches, rows, ...)` with rows split over the replicas; or `ResidentBatches`,
        which `stacked` turns into stacks.
      count: number of real batches; they come first.
      rows: number of real rows of each batch; they come first. Padding rows make the number divisible by the replicas,
        and the program cuts them off.
      first: the index of the first batch in its epoch.
      resume_token: as in `Group`.
    """

    data: Any
    count: int
    rows: int
    first: int
    resume_token: ResumeToken | None = None

    @functools.cached_property
    def spec(self) -> Any:
        """Common properties of groups for one executable: structure, shapes, dtypes and real rows; hashable."""
        return shapes_key(self.data), self.rows


def stacked(group: PlacedGroup, start: int, length: int, placed_start: jax.Array) -> PlacedGroup:
    """Returns up to `length` batches of `ResidentBatches`, from `start` (`placed_start` on devices), as a stack."""
    batches: ResidentBatches = group.data
    data = retried(_gathering(length, batches.numbers.sharding), batches, placed_start)
    return dataclasses.replace(
        group, data=data, count=min(group.count - start, length), first=group.first + start)


@functools.lru_cache(maxsize=64)
def _gathering(length: int, sharding: Sharding) -> Any:
    def gather_stack(batches: ResidentBatches, start: jax.Array) -> Any:
        return gathered(batches, start, length)

    return compiled(gather_stack, sharding)


def retried(call: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of a call. If device memory runs out, it releases cached arrays and repeats the call once.

    Args:
      call: runs or places something on devices.
      *arguments: its arguments. If some were donated to the call that failed, the call is not repeated.

    Raises:
      JaxRuntimeError: if memory runs out again; or any other error of `call`.
    """
    try:
        return call(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(arguments)):
            error.add_note(_STATE_IS_LOST)
            raise
    let_go_of_unused()  # outside the block, because its error holds arrays of the call
    try:
        return call(*arguments)
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            error.add_note(f"What a step needs, and what makes it less: {see('out-of-memory')}")
        raise


def to_devices(tree: PyTree, shardings: Any) -> Any:
    """Returns the arrays of a tree placed on devices, each device with only its part.

    If the devices belong to several processes, each process places on its own devices, and all must have the whole
    arrays. On described devices nothing is placed: the result is the shapes of the arrays.

    Args:
      tree: host arrays, or JAX arrays, whose buffers the result may share.
      shardings: a sharding, or a tree of shardings like `tree`.
    """
    if any(is_described(next(iter(each.device_set))) for each in jax.tree.leaves(shardings)[:1]):
        if isinstance(shardings, Sharding):
            return jax.tree.map(lambda leaf: shape_on(leaf, shardings), tree)
        return jax.tree.map(shape_on, tree, shardings)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return retried(jax.device_put, tree, shardings)
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda leaf: _to_devices_of_all(leaf, shardings), tree)
    return jax.tree.map(_to_devices_of_all, tree, shardings)


def batches_to_devices(batches: PyTree, sharding: Sharding) -> Any:
    """Returns host arrays placed as by `to_devices`, in half the time, because every iteration of the loop calls it.

    The devices are not described devices.
    """
    # JAX regards this transfer as implicit, but the trainer requests it.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(lambda leaf: _to_devices_of_all(leaf, sharding), batches)


def shape_on(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array on described devices, in place of the array."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    dtype = leaf.dtype if is_key else canonical_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


def _to_devices_of_all(leaf: ArrayLike, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)  # from all processes' devices to all processes' devices
    host = np.asarray(leaf)
    return retried(jax.make_array_from_callback, host.shape, sharding, lambda index: host[index])


def replicas_to_devices(tree: PyTree, replicas: int, sharding: Sharding) -> Any:
    """Returns arrays `(replicas, ...)` on the devices of their replicas.

    Args:
      tree: host arrays with an entry for every replica, or only for each replica of this process.
      replicas: number of replicas.
      sharding: sharding of the result.

    Raises:
      ValueError: if there is another number of entries.
    """
    entries = {leaf.shape[0] for leaf in jax.tree.leaves(tree)}
    if entries <= {replicas}:
        return to_devices(tree, sharding)
    here = replicas_here(replicas, sharding)
    if entries != {len(here)}:
        raise ValueError(f"Expected an entry for each of {replicas} replicas, or of the {len(here)} of this process. "
                         f"Received: {sorted(entries)}.")

    def placed(leaf: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(replicas)
            return leaf[here.index(first):here.index(first) + last - first]

        return jax.make_array_from_callback((replicas, *leaf.shape[1:]), sharding, part)

    return jax.tree.map(placed, tree)


def replicas_here(replicas: int, sharding: Sharding) -> list[int]:
    """Returns the indices of the replicas with devices of this process, by the sharding of arrays `(replicas, ...)`."""
    found: set[int] = set()
    for index in sharding.addressable_devices_indices_map((replicas,)).values():
        assert index is not None
        found.update(range(*index[0].indices(replicas)))
    return sorted(found)


def is_split_over_processes(array: object) -> bool:
    """Returns whether no process has the whole array."""
    return isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)


def to_host(array: Any) -> np.ndarray:
    """Returns the whole array on the host. If the array is split over processes, all of them must call this."""
    if not is_split_over_processes(array):
        return np.asarray(array)
    assert isinstance(array.sharding, NamedSharding), "of a strategy's mesh"
    whole = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.asarray(whole.addressable_data(0))


def free_to_move(tree: PyTree, mesh: Mesh | None = None) -> Any:
    """Returns a tree whose arrays may be used on any devices.

    JAX does not combine arrays that were committed to different devices, by another model or by the user.

    Args:
      tree: arrays.
      mesh: arrays on its devices are left as they are; others come to the host.
    """
    devices = set() if mesh is None else set(mesh.devices.flat)

    def free(leaf: Any) -> Any:
        if not getattr(leaf, "committed", False):
            return leaf
        fits = leaf.sharding.device_set == devices and getattr(leaf.sharding, "mesh", mesh) == mesh
        return leaf if fits else to_host(leaf)

    return jax.tree.map(free, tree)


def pad_rows(array: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Returns `array` with `axis` extended to `size` by repeating its entries from the first on."""
    return np.take(array, np.arange(size) % array.shape[axis], axis=axis)


def pad_stack(stack: np.ndarray, count: int, rows: int) -> np.ndarray:
    """Returns stacked batches `(capacity, fewer rows, ...)`, of which `count` are defined, padded to `rows` rows."""
    padded = aligned_empty((stack.shape[0], rows, *stack.shape[2:]), stack.dtype)
    padded[:count] = pad_rows(stack[:count], rows, axis=1)
    return padded


def copy_to_devices(arrays: HostArrays, sharding: Sharding, multiple: int = 1) -> Any:
    """Returns arrays on devices, in JAX's dtypes, without sharing memory with their owner.

    Args:
      arrays: the arrays.
      sharding: sharding of the result.
      multiple: rows are padded to a multiple of this number. If it is 1, small arrays are padded to a shared length.
        Padding is never read.

    Raises:
      DataError: if a finite number would become infinite, or an integer wrap around.
    """
    devices: list[jax.Device] = list(sharding.device_set)
    on_cpu = devices[0].platform == "cpu"
    enough = _shared_length(arrays.rows, arrays.nbytes) if multiple == 1 else arrays.rows

    def placed(array: np.ndarray) -> jax.Array:
        rows, dtype = -(-enough // multiple) * multiple, canonical_dtype(array.dtype)
        # A CPU device shares aligned memory; several devices would copy unaligned memory once each.
        jax_copies = not on_cpu or (len(devices) == 1 and not is_aligned(array))
        if jax_copies and (rows, dtype) == (array.shape[0], array.dtype):
            return to_devices(array, sharding)
        copy = aligned_empty((rows, *array.shape[1:]), dtype)
        assign(copy[:array.shape[0]], array)
        copy[array.shape[0]:] = 0
        return to_devices(copy, sharding)

    return map_casting(placed, arrays.tree)


def _shared_length(rows: int, size: int) -> int:
    """Returns a padded length for arrays of this number of rows and bytes, so that small arrays share few programs.

    >>> [_shared_length(rows, 1024 * rows) for rows in (3, 1000, 1025, 53_999)]
    [1024, 1024, 2048, 53999]
    """
    if size > SMALL_BYTES:
        return rows  # a longer copy would double the host memory
    least = _PADDED_BYTES * rows // max(size, 1)
    return max(2 ** (rows - 1).bit_length(), 2 ** (least.bit_length() - 1))


def spec_text(sharding: Sharding, shape: Sequence[int]) -> str:
    """Returns the partition spec of an array of a shape as text: the mesh axes of its dimensions, or `REPLICATED`."""
    if isinstance(sharding, NamedSharding):
        return REPLICATED if all(entry is None for entry in sharding.spec) else str(tuple(sharding.spec))
    return REPLICATED if sharding.is_fully_replicated else f"shards of {sharding.shard_shape(tuple(shape))}"
