"""The sharing of batches by several processes: the policies of `tf.data`, and their attachment to data."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe, unknown_name
from trainer.core.types import Data
from trainer.data.sources.arrays import are_rows


class AutoShardPolicy(enum.Enum):
    """The rows that each of several processes reads. With a single process, all policies are the same.

    Attributes:
      AUTO: like DATA, but data are sharded at their source if possible: for a `grain.MapDataset` whose last step is
        `batch`, each process loads and maps only the rows of its own replicas.
      DATA: every process receives the same batches, uses the rows of its own replicas and drops the rest.
      OFF: every process receives its own batches: the batch of a step is the batch of process 0, followed by the batch
        of process 1, and so on. Their numbers of rows and of batches may differ; an epoch ends with the last batch of
        any process.

    There is no FILE: to share files, give each process its own files and pass OFF.

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
    """Data with options, made by `with_options`.

    Attributes:
      data: an iterable of batches.
      auto_shard_policy: the sharing by several processes.
    """

    def __init__(self, data: Any, auto_shard_policy: AutoShardPolicy):
        self.data = data
        self.auto_shard_policy = auto_shard_policy

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __repr__(self) -> str:
        return f"with_options({describe(self.data)}, auto_shard_policy={self.auto_shard_policy})"


def policy_of(data: Data) -> AutoShardPolicy:
    """Returns the policy of data from `with_options`; AUTO for other data.

    >>> policy_of(with_options(iter([[1.0]]), "off")).name
    'OFF'
    """
    return data.auto_shard_policy if isinstance(data, DataWithOptions) else AutoShardPolicy.AUTO


@explains_arguments
def with_options(data: Data, auto_shard_policy: AutoShardPolicy | str) -> DataWithOptions:
    """Returns data with a policy for sharing by several processes.

    Args:
      data: any batches that `fit` takes: a batched `Dataset`, a generator, Grain, a torch `DataLoader`.
      auto_shard_policy: an `AutoShardPolicy`, or its name.

    Raises:
      ValueError: if there is no such policy, if `data` already has a policy, or if it is arrays, which need no policy.

    Example:
      >>> batches = with_options(iter([[1.0], [2.0]]), AutoShardPolicy.OFF)
      >>> list(batches)
      [[1.0], [2.0]]

    Source: `tf.data.Dataset.with_options`.
    """
    if isinstance(data, DataWithOptions):
        raise ValueError(f"The data have the policy {data.auto_shard_policy} already. Give it once.")
    if are_rows(data):
        raise ValueError("`data` must yield batches. Received: arrays, which are the same in all processes. For rows "
                         "that only this process has, pass `Dataset.from_arrays(data).batch(batch_size)`.")
    return DataWithOptions(data, AutoShardPolicy.of(auto_shard_policy))
