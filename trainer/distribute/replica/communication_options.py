"""How replicas communicate, as the user wishes it: hints for the reductions in `collectives.py`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from trainer.core import errors
from trainer.core.arguments import check_count, require_bool, require_positive


class CommunicationImplementation(enum.Enum):
    """Which algorithm reduces over the replicas, as in `tf.distribute.experimental.CommunicationImplementation`.

    Attributes:
      AUTO: the one of the strategy's `cross_device_ops`.
      RING: a ring of copies from replica to replica, `RingAllReduce`.
      NCCL: the all-reduce of the backend, `NcclAllReduce`: NCCL's on NVIDIA GPUs.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"

    @classmethod
    def of(cls, implementation: CommunicationImplementation | str) -> CommunicationImplementation:
        """Returns the member for `implementation`, which may be its name in any case.

        Raises:
          ValueError: for a name that no member has.
          TypeError: for anything but a member or a name.
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
    """Hints for reductions over replicas, of one strategy or of one `all_reduce`.

    Attributes:
      bytes_per_pack: how many bytes of a tree are reduced at once, about: an array is never divided. Smaller packs can
        start sooner, larger packs have less overhead. 0 leaves it to the trainer, which takes 256 KiB on CPUs and
        leaves it to the compiler elsewhere. On GPUs the number of a strategy is up to how much XLA joins, of
        all-reduces, all-gathers and reduce-scatters.
      overlap: of a strategy on several GPUs, whether the compiler schedules collectives beside other work (XLA's
        latency-hiding scheduler). That takes memory, for what is kept while it is sent.
      timeout_seconds: how long processes may wait for each other, in seconds; None leaves it to the runtime. It is no
        part of a compiled reduction: a strategy of several processes may watch it.
      implementation: which algorithm, or its name in any case.

    Raises:
      ValueError: if a value is out of its range, or the implementation unknown.
      TypeError: if a value is of another type.

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


def checked_options(options: Any) -> CommunicationOptions | None:
    """Returns `options`, or raises TypeError if they are anything but CommunicationOptions or None."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise errors.wrong_type("options", options, "CommunicationOptions or None")
    return options


def without_implementation(options: Any) -> CommunicationOptions:
    """Returns the options of a strategy whose reductions are the compiler's; defaults for None.

    Raises:
      TypeError: as `checked_options`.
      ValueError: if the options name an algorithm.
    """
    options = checked_options(options) or CommunicationOptions()
    if options.implementation is not CommunicationImplementation.AUTO:
        raise ValueError("The compiler chooses how this strategy reduces: give no `implementation`. "
                         f"Received: {options}.")
    return options
