"""Throughput of a training: rows and floating-point operations per second, and the share of the devices' peak.

Owns the definition of training time, and the peaks of devices.
"""

from __future__ import annotations

from typing import Any

import jax

from trainer.callbacks.base.callback import Logs, adds_logs
from trainer.callbacks.base.run_protocol import run_detail
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.core.arguments import require_positive

# Peak operations per second of dense 16-bit matrices, by JAX's `device_kind`: bfloat16, or float16 on V100 and T4,
# which have no bfloat16. NVIDIA's data sheets list twice as much for H100 and L4, with structured sparsity.
_PEAK_FLOPS_PER_SEC = {
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    "Tesla T4": 65e12,
    # https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet
    "NVIDIA L4": 121e12,
    # https://cloud.google.com/tpu/docs/v4, and likewise v5e, v5p and v6e: "peak compute per chip (bf16)". The kinds
    # come from jax/_src/tpu_info.py.
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


class Throughput(TrainBatchCallback):
    """Adds the throughput of each epoch to its logs.

    The logs are:

    - `rows_per_sec`: Training rows per second, over all devices.
    - `model_flops_per_sec`: Floating-point operations per second, over all devices; absent if XLA does not report the
      operations of a step, for example of an eager step. XLA counts the operations of the step's program: operations
      that `remat` repeats count again; the body of a loop, the layers of a scan and the parts of `microbatches` count
      once.
    - `utilization`: Share of the devices' peak; absent if the peak is unknown.

    The time is measured from the beginning of the epoch to the end of its last step on the device. It includes the wait
    for data and the callbacks between batches, which may delay the device. It excludes compilation, validations, also
    in mid-epoch, and other callbacks at the end of an epoch, so the first epoch is comparable to the others. Only the
    end of an epoch waits for this callback.

    Args:
      peak_flops_per_sec: peak floating-point operations per second of a device. None uses a table of common
        accelerators, with the peak of dense bfloat16 matrices (float16 on older GPUs). For a model that computes in
        float32, pass the float32 peak.

    Raises:
      TypeError: if the peak is not a number.
      ValueError: if the peak is not positive.

    Example:

    >>> import trainer, numpy as np
    >>> from flax import linen as nn
    >>> model = trainer.Model(nn.Dense(1))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((64, 2)), np.ones((64, 1)), verbose=0, callbacks=[Throughput(1e12)]).history
    >>> history["rows_per_sec"][0] > 0, 0 < history["utilization"][0] < 1
    (True, True)

    Source: for the utilization, Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B, but with the
    operations of the program instead of the operations that the model needs.
    """

    def __init__(self, peak_flops_per_sec: float | None = None):
        if peak_flops_per_sec is not None:
            require_positive(peak_flops_per_sec=peak_flops_per_sec)
        self.peak_flops_per_sec = peak_flops_per_sec
        self._rows_of_batch = 0.0  # of a full batch, as counted by `train_step_flops`
        self._begin_rows = self._rows = 0
        self._begin_secs = self._execution_secs = 0.0
        self._end_secs: float | None = None  # of the last step, once it has ended
        self._train_logs: Any = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._rows_of_batch = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._begin_rows = self._rows = self.model.current_run.timing.rows
        self._begin_secs = self._execution_secs = self._secs()
        self._end_secs, self._train_logs = None, {}

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        rows = self.model.current_run.timing.rows
        self._rows_of_batch = max(self._rows_of_batch, (rows - self._rows) / (last - first + 1))
        self._rows, self._train_logs = rows, logs
        self._execution_secs, self._end_secs = self._secs(), None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self._end_secs is None:
            self._end_steps()

    def on_test_end(self, logs: Logs | None = None) -> None:
        # The time since the last step is not training time.
        if self._end_secs is not None:
            now = self._secs()
            self._begin_secs, self._end_secs = self._begin_secs + now - self._end_secs, now

    @adds_logs("rows_per_sec", "model_flops_per_sec", "utilization")
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._end_secs is None:
            self._end_steps()
        rows, secs = self._rows - self._begin_rows, (self._end_secs or 0.0) - self._begin_secs
        if logs is None or rows == 0 or secs <= 0:
            return
        logs["rows_per_sec"] = rows / secs
        flops = run_detail(self.model, "train_step_flops", lambda: None)()
        if flops:
            # By rows, so that a smaller last batch counts in proportion.
            logs["model_flops_per_sec"] = flops / self._rows_of_batch * rows / secs
            devices = self._devices()
            peak = self.peak_flops_per_sec or _PEAK_FLOPS_PER_SEC.get(devices[0].device_kind)
            if peak:
                logs["utilization"] = logs["model_flops_per_sec"] / (peak * len(devices))

    def _end_steps(self) -> None:
        """Waits for the running steps, after which no training is in progress."""
        begin = self._secs()
        dict(self._train_logs or {})
        waited = self._secs() - begin
        # For a validation by an earlier callback, the last execution is not known here yet.
        is_last_known = self.model.current_run.timing.rows == self._rows
        self._end_secs = waited + (self._execution_secs if is_last_known else begin)

    def _secs(self) -> float:
        """Returns the seconds of the run so far, without compilation and without other runs inside of it."""
        timing = self.model.current_run.timing
        report = timing.report()
        return report["total"] - report["compile"] - timing.inner_secs

    def _devices(self) -> list[Any]:
        """Returns the devices of the weights."""
        leaves = jax.tree.leaves(self.model.current_run.state.params)
        return list(leaves[0].sharding.device_set) if leaves else jax.local_devices()[:1]
