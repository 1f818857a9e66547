"""How batches are shared by several processes: the policies of `tf.data`, and how a policy is attached to data."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from trainer.core.errors import describe, unknown_name
from trainer.core.types import Data
from trainer.data.sources.arrays import is_array_tree, is_list_of_batches


class AutoShardPolicy(enum.Enum):
    """Which rows each of several processes reads. With one process all policies are the same.

    Attributes:
      AUTO: as DATA, except that data which can be sharded at their source are: of a `grain.MapDataset` whose last step
        is `batch`, each process loads and maps only the rows of its own replicas.
      DATA: every process is given the same batches, of which it uses the rows of its own replicas and drops the rest.
      OFF: every process is given batches of its own: the batch of a step is that of process 0, followed by that of
        process 1, and so on. They may have different numbers of rows, and one process may have fewer batches than
        another; an epoch ends with the last of them.

    There is no FILE: to share files, give each process its own and pass OFF.

    Source: `tf.data.experimental.AutoShardPolicy`.
    """

    AUTO = "auto"
    DATA = "data"
    OFF = "off"

    @classmethod
    def of(cls, policy: AutoShardPolicy | str) -> AutoShardPolicy:
        """Returns the member for `policy`, which may be its name in any case."""
        if isinstance(policy, cls):
            return policy
        try:
            return cls(str(policy).lower())
        except ValueError:
            raise unknown_name("auto_shard_policy", str(policy), [member.value for member in cls]) from None


class DataWithOptions:
    """Data and what is to be done with them; made by `with_options`.

    Attributes:
      data: whatever yields batches.
      auto_shard_policy: how several processes share them.
    """

    def __init__(self, data: Any, auto_shard_policy: AutoShardPolicy):
        self.data = data
        self.auto_shard_policy = auto_shard_policy

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __repr__(self) -> str:
        return f"with_options({describe(self.data)}, auto_shard_policy={self.auto_shard_policy})"


def policy_of(data: Data) -> AutoShardPolicy:
    """Returns the policy that `with_options` gave to data; AUTO for others.

    >>> policy_of(with_options(iter([[1.0]]), "off")).name
    'OFF'
    """
    return data.auto_shard_policy if isinstance(data, DataWithOptions) else AutoShardPolicy.AUTO


def with_options(data: Data, auto_shard_policy: AutoShardPolicy | str) -> DataWithOptions:
    """Returns data to be shared by several processes in a given way.

    Args:
      data: whatever `fit` takes as batches: a batched `Dataset`, a generator, Grain, a torch `DataLoader`.
      auto_shard_policy: an `AutoShardPolicy`, or its name.

    Raises:
      ValueError: if there is no such policy, if `data` has a policy already, or if it is arrays, which have no use for
        a policy.

    Example:
      >>> batches = with_options(iter([[1.0], [2.0]]), AutoShardPolicy.OFF)
      >>> list(batches)
      [[1.0], [2.0]]

    Source: `tf.data.Dataset.with_options`.
    """
    if isinstance(data, DataWithOptions):
        raise ValueError(f"The data have the policy {data.auto_shard_policy} already. Give it once.")
    if is_array_tree(data) and not is_list_of_batches(data):
        raise ValueError("`data` must yield batches. Received: arrays, which are the same in all processes. For rows "
                         "that only this process has, pass `Dataset.from_arrays(data).batch(batch_size)`.")
    return DataWithOptions(data, AutoShardPolicy.of(auto_shard_policy))
