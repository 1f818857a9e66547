"""Programs of train steps for GPUs that are only described: what XLA makes of a step can be read without a GPU.

Needs the CUDA plugin of jaxlib's version (`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt`), without CUDA.
Kernels are not autotuned: look at the structure of a program, not at which kernels were picked.
"""

import contextlib
import importlib.util
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies

from trainer.compile.jit import compile_lowered
from trainer.distribute.placement.placement import PlacedGroup
from trainer.step import compiled_phase
from trainer.step.compiled_phase import CompiledPhase

IS_INSTALLED = importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def described_gpus(number):
    """Returns devices of one host that programs can be compiled for, but nothing can be put on."""
    return list(topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{number}", target_config=H100).devices)


def _shapes(tree, shardings):
    is_one = isinstance(shardings, jax.sharding.Sharding)
    shardings = jax.tree.map(lambda leaf: shardings, tree) if is_one else shardings
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(
        np.shape(leaf), jax.dtypes.canonicalize_dtype(np.result_type(leaf)), sharding=sharding), tree, shardings)


@contextlib.contextmanager
def _nothing_is_placed():
    with (mock.patch.object(compiled_phase, "to_devices", _shapes),
          mock.patch.object(compiled_phase, "_of_one_device", lambda running: running),
          mock.patch.object(compiled_phase, "compiling", return_value=None)):
        yield


def compiled_train_step(model, strategy, batch, steps_per_execution=1):
    """Returns a train step compiled for a strategy's described GPUs.

    Args:
      model: a compiled model, made under a strategy of this machine's devices.
      strategy: the strategy to compile for, such as `Strategy(described_gpus(8))`.
      batch: `(x, y)`, whose rows divide by the replicas.
      steps_per_execution: how many steps go into one execution.
    """
    deterministic = model._configuration.options.deterministic
    phase = CompiledPhase("train", model.train_step, strategy, steps_per_execution, False, deterministic=deterministic)
    stack = jax.tree.map(lambda leaf: np.stack([leaf] * min(steps_per_execution, 2)), batch)
    number = _shapes(np.int32(0), strategy.logs_sharding)

    def place_group(group, arrays=None, rows_of_replica=0):
        return PlacedGroup(_shapes(stack, strategy.batch_sharding), None, steps_per_execution, group.rows, 0)

    with (_nothing_is_placed(), mock.patch.object(strategy, "place_group", place_group),
          mock.patch.object(strategy, "place_number", return_value=number)):
        state = model.state_shapes(batch[0])
        phase.prepare(state, batch)
        return compile_lowered(phase.lowered(state, batch), strategy.compiler_options(deterministic))
