"""Communication options: the user's hints for the reductions in `collectives.py`."""

from __future__ import annotations

import dataclasses
import enum

from trainer.core import errors
from trainer.core.arguments import check_count, require_bool, require_positive


class CommunicationImplementation(enum.Enum):
    """Algorithm of reductions over replicas, as in `tf.distribute.experimental.CommunicationImplementation`.

    Attributes:
      AUTO: the algorithm of the strategy's `cross_device_ops`.
      RING: a ring of copies from replica to replica, `RingAllReduce`.
      NCCL: the all-reduce of the backend, `NcclAllReduce`, which uses NCCL on NVIDIA GPUs.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"

    @classmethod
    def of(cls, implementation: CommunicationImplementation | str) -> CommunicationImplementation:
        """Returns the member for `implementation`, a member or its name in any case.

        Raises:
          ValueError: if no member has this name.
          TypeError: if `implementation` is neither a member nor a name.
        """
        if isinstance(implementation, cls):
            return implementation
        if not isinstance(implementation, str):
            raise errors.wrong_type("implementation", implementation, "a CommunicationImplementation or its name")
        if implementation.upper() not in cls.__members__:
            raise errors.unknown_name("implementation", implementation, cls.__members__)
        return cls[implementation.upper()]


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Hints for reductions over replicas, for a strategy or for a single `all_reduce`.

    Attributes:
      bytes_per_pack: approximate number of bytes that are reduced together; an array is never divided. Smaller packs
        start sooner, larger packs have less overhead. 0 means 256 KiB on CPUs, and leaves the choice to the compiler
        elsewhere. On GPUs, for a strategy, it limits the size of the all-reduces, all-gathers and reduce-scatters that
        XLA combines.
      overlap: for a strategy on several GPUs, whether the compiler overlaps collectives with other work (XLA's
        latency-hiding scheduler). This takes memory for the buffers in transfer.
      timeout_seconds: how long processes may wait for each other, in seconds; None for the default of the runtime. It
        is not part of a compiled reduction; a strategy of several processes may enforce it.
      implementation: the algorithm, or its name in any case.

    Raises:
      ValueError: if a value is out of range or the implementation is unknown.
      TypeError: if a value has the wrong type.

    Example:
      >>> CommunicationOptions(bytes_per_pack=50 * 2**20, implementation="nccl").implementation
      <CommunicationImplementation.NCCL: 'NCCL'>

    Source: `tf.distribute.experimental.CommunicationOptions`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    overlap: bool = True

    def __post_init__(self) -> None:
        check_count("bytes_per_pack", self.bytes_per_pack, 0)
        require_bool(overlap=self.overlap)
        if self.timeout_seconds is not None:
            require_positive(timeout_seconds=self.timeout_seconds)
        object.__setattr__(self, "implementation", CommunicationImplementation.of(self.implementation))


# Their old names in `tf.distribute.experimental`.
CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions


def checked_options(options: object) -> CommunicationOptions | None:
    """Returns `options`. Raises TypeError if they are neither CommunicationOptions nor None."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise errors.wrong_type("options", options, "CommunicationOptions or None")
    return options


def without_implementation(options: object) -> CommunicationOptions:
    """Returns the options of a strategy whose reductions are made by the compiler; defaults for None.

    Raises:
      TypeError: if `options` are neither CommunicationOptions nor None.
      ValueError: if the options name an algorithm.
    """
    options = checked_options(options) or CommunicationOptions()
    if options.implementation is not CommunicationImplementation.AUTO:
        raise ValueError("The compiler chooses how this strategy reduces: give no `implementation`. "
                         f"Received: {options}.")
    return options
