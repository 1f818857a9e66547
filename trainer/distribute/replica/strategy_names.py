"""Names of PyTorch, Lightning, Horovod and `keras.distribution` that `trainer.distribute` lacks.

Owns the sentences that end the errors.
"""

_MIRRORED = ("Instead: `MirroredStrategy()` on one machine, `MultiWorkerMirroredStrategy()` on several; make, compile "
             "and fit the model in `with strategy.scope():`.")
_ONE = "Instead: `OneDeviceStrategy(\"gpu:0\")`; without a strategy, `fit` takes all accelerators of the machine."
_PROCESSES = ("Leave it out: `MultiWorkerMirroredStrategy()` joins the processes, and `strategy.is_chief` is True in "
              "the first.")
_REDUCTION = "In a step: `get_replica_context().all_reduce` or `all_gather`."
_SHARDED = "Instead: `FullyShardedStrategy()`, whose `level=\"optimizer\"` splits only the optimizer's state."
_SPLIT = "Instead: `ModelParallelStrategy(mesh_shape, layout_map=...)`."
_TPU = "Instead: `TPUStrategy()`."

# : By the name that is missing.
MISSING = {
    **dict.fromkeys(("DDP", "DDPStrategy", "DataParallel", "DataParallelStrategy", "DistributedDataParallel",
                     "HorovodStrategy", "ParallelStrategy"), _MIRRORED),
    **dict.fromkeys(("SingleDeviceStrategy",), _ONE),
    **dict.fromkeys(("DDPFullyShardedStrategy", "DDPShardedStrategy", "DeepSpeedStrategy", "FSDP", "FSDPStrategy",
                     "FullyShardedDataParallel", "fully_shard"), _SHARDED),
    **dict.fromkeys(("DeviceMesh", "ModelParallel", "TensorParallel", "init_device_mesh"), _SPLIT),
    **dict.fromkeys(("SingleDeviceXLAStrategy", "SingleTPUStrategy", "XLAStrategy"), _TPU),
    **dict.fromkeys(("barrier", "destroy_process_group", "get_rank", "get_world_size", "init", "init_process_group",
                     "initialize", "is_initialized", "local_rank", "rank", "size"), _PROCESSES),
    **dict.fromkeys(("all_gather", "all_reduce", "broadcast", "reduce"), _REDUCTION),
    "list_devices": "Instead: `jax.devices()`.",
    "set_distribution": "Instead: `with strategy.scope():`.",
}
