"""ParameterServerStrategy, and the state of models made under it."""

from __future__ import annotations

import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Literal

import jax
import optax

from trainer.core import arguments, errors
from trainer.data.sources.arrays import HostArrays
from trainer.distribute.cluster import TF_CONFIG, ClusterError, TFConfigClusterResolver
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
from trainer.distribute.parameter_server.embedding_table import EmbeddingTable, make_table
from trainer.distribute.parameter_server.partitioners import Partitioner
from trainer.distribute.parameter_server.per_worker import PerWorkerDataset
from trainer.distribute.parameter_server.processes.engine import Engine, Handle
from trainer.distribute.parameter_server.processes.failures import (
    EXIT_CODE,
    ParameterServerLostError,
    exit_with_code_of_lost_server,
)
from trainer.distribute.parameter_server.processes.local_processes import LocalProcesses
from trainer.distribute.parameter_server.processes.ray_cluster import RayCluster
from trainer.distribute.parameter_server.processes.tf_config_cluster import ROLES, check_roles, serve
from trainer.distribute.parameter_server.processes.wire import Resource
from trainer.distribute.parameter_server.served_model import ServedModel
from trainer.distribute.parameter_server.server import ParameterServer
from trainer.distribute.parameter_server.shared import SharedValue
from trainer.distribute.parameter_server.worker import Worker
from trainer.distribute.parameter_server.worker_strategy import WorkerStrategy
from trainer.distribute.placement.device_cache import checksums_of
from trainer.distribute.placement.devices import default_devices
from trainer.distribute.replica.distributed_dataset import InputContext
from trainer.distribute.strategies.strategy import Strategy
from trainer.optimizers.base import Optimizer
from trainer.optimizers.registry import as_optimizer
from trainer.optimizers.update_rule import UpdateRule

_keys = itertools.count()  # of the models of all strategies
SHARED_BYTES = 2**28  # of arrays that every worker gets whole; batches of larger arrays are sent individually


class ParameterServerStrategy(Strategy):
    """Asynchronous training: workers compute gradients, and parameter servers apply them as they arrive.

    This process is the chief. It does not train: it hands out batches, and holds the objects of `fit`. `evaluate` and
    `predict` run here, exactly. Workers may be lost at any time. The loss of a server ends the run, and the same
    command continues from the newest checkpoint of `BackupAndRestore`. See docs/parameter_server.md.

    Use it in a `with` block, which ends the cluster; otherwise the cluster ends with this process.

    Args:
      cluster_resolver: the tasks of a cluster of several machines, on Ray. Without it and without `num_workers`, the
        tasks of the environment variable TF_CONFIG. The same script runs in each task: in the chief's task it
        continues; workers and parameter servers serve in this call, and exit with the chief's exit code.
      variable_partitioner: chooses the tables of `nn.Embed` to split, as in `tf.distribute`: their rows are spread over
        the servers, and workers pull and push only the rows that a batch looks up. All other parameters stay whole and
        are distributed by size. None splits none.
      num_workers: number of processes that compute.
      num_ps: number of processes that hold parameters.
      address: "host:port" of a Ray cluster for these processes, or "local" to start a Ray cluster on this machine. None
        starts the processes on this machine without Ray.
      max_staleness: a batch starts only after all but the last `max_staleness` earlier batches are applied, so that a
        gradient misses at most `2 * max_staleness` updates. 0 trains batches sequentially, with the results of one
        device. None does not wait.
      staleness: "scale" divides a gradient by 1 + the number of updates that it has missed; None does not scale.
      worker_timeout: seconds after which the worker of an unfinished function is killed, and the function runs on
        another worker. None waits as long as the worker lives.

    Raises:
      ClusterError: if the cluster has no workers or no parameter servers.
      ValueError, TypeError: if another argument cannot be used.

    Example:
      >>> with ParameterServerStrategy(num_workers=2, num_ps=1) as strategy:  # doctest: +SKIP
      ...     with strategy.scope():
      ...         model = trainer.Model(nn.Dense(1))
      ...         model.compile("sgd", "mse")
      ...     model.fit(x, y, epochs=2)

    Source: `tf.distribute.ParameterServerStrategy`.
    """

    is_asynchronous = True

    def __init__(
        self,
        cluster_resolver: TFConfigClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        num_workers: int | None = None,
        num_ps: int | None = None,
        address: str | None = None,
        max_staleness: int | None = None,
        staleness: Literal["scale"] | None = None,
        worker_timeout: float | None = None,
    ):
        if cluster_resolver is not None and (num_workers, num_ps, address) != (None, None, None):
            raise ValueError("`cluster_resolver` says which workers and parameter servers there are. Leave out "
                             "`num_workers`, `num_ps` and `address`.")
        if cluster_resolver is not None and not isinstance(cluster_resolver, TFConfigClusterResolver):
            raise errors.wrong_type("cluster_resolver", cluster_resolver, "a TFConfigClusterResolver")
        if variable_partitioner is not None and not isinstance(variable_partitioner, Partitioner):
            raise errors.wrong_type("variable_partitioner", variable_partitioner,
                                    "a partitioner such as MinSizePartitioner()")
        if cluster_resolver is None and num_workers is None and num_ps is None and TF_CONFIG in os.environ:
            cluster_resolver = TFConfigClusterResolver()
        spec = {} if cluster_resolver is None else cluster_resolver.cluster_spec()
        if cluster_resolver is not None:
            _check_task(cluster_resolver)
            num_workers, num_ps = len(spec["worker"]), len(spec["ps"])
        if num_workers is None or num_ps is None:
            raise ClusterError("A ParameterServerStrategy needs workers and parameter servers. Give `num_workers` and "
                               "`num_ps` for processes of this machine, or, in each task of several machines, set "
                               "TF_CONFIG with 'chief', 'worker' and 'ps', and RAY_AUTH_TOKEN_PATH. Received: "
                               f"num_workers={num_workers}, num_ps={num_ps}.")
        self.num_workers, self.num_ps = (arguments.as_count(name, value) for name, value in (
            ("num_workers", num_workers), ("num_ps", num_ps)))
        arguments.check_count("max_staleness", max_staleness, 0, optional=True)
        if address is not None and not isinstance(address, str):
            raise errors.wrong_type("address", address, "the address of a Ray cluster, such as '10.0.0.1:6379'")
        if staleness not in (None, "scale"):
            raise ValueError(f"`staleness` must be 'scale' or None. Received: {staleness!r}.")
        if worker_timeout is not None:
            arguments.require_positive(worker_timeout=worker_timeout)
        if cluster_resolver is not None and cluster_resolver.task_type != "chief":
            name = f"{cluster_resolver.task_type} {cluster_resolver.task_id}"
            raise SystemExit(serve(spec["chief"][0], name))
        super().__init__(default_devices()[:1])
        self.max_staleness = max_staleness
        self._partitioner = variable_partitioner
        exit_with_code_of_lost_server()
        self._engine: Engine
        if cluster_resolver is not None:
            tasks = [f"{role} {index}" for role in ROLES for index in range(len(spec[role]))]
            self._engine = RayCluster(chief=spec["chief"][0], tasks=tasks)
        else:
            self._engine = LocalProcesses() if address is None else RayCluster(address)
        self._end: weakref.finalize[..., Any] = weakref.finalize(self, self._engine.close)
        self._servers = [
            self._engine.start(f"ps {index}", "ps", functools.partial(ParameterServer, staleness == "scale"))
            for index in range(self.num_ps)]
        workers = [self._start_worker(index) for index in range(self.num_workers)]
        self._coordinator = ClusterCoordinator._of(self, workers, self._start_worker, worker_timeout)
        self._end.detach()
        self._end = weakref.finalize(self, _end, self._coordinator, self._engine)
        self._models: weakref.WeakKeyDictionary[Any, ServedModel] = weakref.WeakKeyDictionary()
        self._tables: set[str] = set()
        self._shared: weakref.WeakKeyDictionary[HostArrays, SharedValue] = weakref.WeakKeyDictionary()
        self._checksums: weakref.WeakKeyDictionary[HostArrays, Any] = weakref.WeakKeyDictionary()  # when they were sent

    def __repr__(self) -> str:
        return f"ParameterServerStrategy(num_workers={self.num_workers}, num_ps={self.num_ps})"

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(_exit_code(error))

    def close(self) -> None:
        """Ends all workers and servers, and cancels queued functions. Models keep their last fetched state."""
        self._close(0)

    def _close(self, code: int) -> None:
        if self._end.detach():
            _end(self._coordinator, self._engine, code)

    @property
    def coordinator(self) -> ClusterCoordinator:
        """Coordinator that schedules functions on the workers."""
        return self._coordinator

    def _start_worker(self, index: int) -> Handle:
        make = functools.partial(Worker, index, self.num_workers, self._servers)
        return self._engine.start(f"worker {index}", "worker", make)

    def __as_resource__(self) -> Resource:
        """Returns the resource of this strategy in a worker, for scheduled functions that use it."""
        return Resource("strategy", WorkerStrategy)

    def create_embedding_table(
        self, name: str, num_embeddings: int, features: int,
        optimizer: str | Optimizer | optax.GradientTransformation = "adagrad",
        initializer: Callable[..., Any] | None = None, seed: int = 0,
    ) -> EmbeddingTable:
        """Returns an embedding table whose rows are spread over the servers; no other process ever holds it whole.

        Scheduled functions look up the rows that a batch needs, and push their gradients.

        Args:
          name: name of the table, also in the folder of `EmbeddingTable.save`.
          num_embeddings: number of rows.
          features: number of values in each row.
          optimizer: the optimizer of rows with gradients: a name, an optimizer or an optax transformation that treats
            each row separately.
          initializer: makes rows, like Flax's initializers; by default a truncated normal distribution with standard
            deviation 1 / sqrt(features), as in TensorFlow's embedding columns.
          seed: seed of the initial rows, which do not depend on the number of servers.

        Raises:
          ValueError: if the optimizer combines rows, or the name is already used.

        Example:
          >>> table = strategy.create_embedding_table("users", 10_000_000, 64)  # doctest: +SKIP
          >>> rows = table.lookup([3, 7])  # doctest: +SKIP
          >>> table.push([3, 7], gradient_of_rows)  # doctest: +SKIP
        """
        self._coordinator.require_open()
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"`name` must be a name such as 'users', for files. Received: {name!r}.")
        if name in self._tables:
            raise ValueError(f"There is a table {name!r} already. Choose another name, or use that table.")
        num_embeddings, features = (arguments.as_count(argument, value) for argument, value in (
            ("num_embeddings", num_embeddings), ("features", features)))
        if initializer is None:
            initializer = jax.nn.initializers.truncated_normal(1 / math.sqrt(features))
        table = make_table(self._servers, name, num_embeddings, features, UpdateRule(as_optimizer(optimizer)),
                           initializer, arguments.as_seed("seed", seed))
        self._tables.add(name)
        return table

    def distribute_datasets_from_function(  # type: ignore[override]
        self, dataset_fn: Callable[[InputContext], Any]
    ) -> PerWorkerDataset:
        """Returns data that each worker reads separately, for `fit` and for scheduled functions.

        `fit` also reads the first batch here, to get its shapes. Each run of `fit`, and each worker that replaces a
        lost worker, starts again. The function controls how often each row is trained, and `steps_per_epoch` sets the
        length of an epoch.

        Args:
          dataset_fn: returns endless batches from an `InputContext`, whose `input_pipeline_id` is the index of the
            worker among `num_input_pipelines`.

        Example:
          >>> data = strategy.distribute_datasets_from_function(  # doctest: +SKIP
          ...     lambda context: read_files(f"part-{context.input_pipeline_id}", batch_size=32))
          >>> model.fit(data, steps_per_epoch=1000, epochs=5)  # doctest: +SKIP
        """
        return PerWorkerDataset(dataset_fn, self.num_workers, self._coordinator.release)

    def training_data(self, data: Any) -> Any:
        if not isinstance(data, PerWorkerDataset):
            return data
        source = data.sample()
        self._shared[source.dataset.arrays] = iter(data)
        return source

    def served(self, model: Any, embeddings: Collection[str] = ()) -> ServedModel:
        """Returns a model's state on the servers.

        Args:
          model: an object that identifies the model, as long as it exists.
          embeddings: the paths of the tables of its `nn.Embed` layers.
        """
        if model not in self._models:
            self._models[model] = ServedModel(f"model {next(_keys)}", self._servers, self._partitioner)
        self._models[model].embeddings = embeddings
        return self._models[model]

    def shared_arrays(self, arrays: HostArrays, wanted: bool | str) -> SharedValue | None:
        """Returns arrays to be sent to each worker once; None if they are not wanted or too large.

        For a sample batch of data that workers read themselves, these data are returned.
        """
        if arrays not in self._shared or self._has_sent_others(arrays):
            if wanted is False or arrays.nbytes > SHARED_BYTES:
                return None
            self._checksums[arrays] = checksums_of(arrays)
            # A new object with the same arrays, because the value would otherwise keep its own key alive.
            self._shared[arrays] = self.shared(HostArrays(jax.tree.map(lambda leaf: leaf, arrays.tree)))
        return self._shared[arrays]

    def has_stale_arrays(self, arrays: HostArrays) -> bool:
        return self._has_sent_others(arrays) or super().has_stale_arrays(arrays)

    def _has_sent_others(self, arrays: HostArrays) -> bool:
        return arrays in self._checksums and self._checksums[arrays] != checksums_of(arrays)

    def shared(self, value: object) -> SharedValue:
        """Returns a placeholder to be sent instead of a value, which a worker gets once."""
        return SharedValue(lambda worker: value, self._coordinator.release)


def _end(coordinator: ClusterCoordinator, engine: Engine, code: int = 0) -> None:
    coordinator.close()  # first, because it replaces workers that have ended
    engine.close(code)


def _check_task(resolver: TFConfigClusterResolver) -> None:
    if resolver.task_type == "evaluator":
        raise ClusterError("An evaluator is not part of the cluster, and makes no ParameterServerStrategy: it uses "
                           "`trainer.distribute.SidecarEvaluator` on the chief's checkpoints.")
    check_roles(resolver.cluster_spec())


def _exit_code(error: BaseException | None) -> int:
    """Returns the exit code of a script that an uncaught exception ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0 if error is None else EXIT_CODE if isinstance(error, ParameterServerLostError) else 1
