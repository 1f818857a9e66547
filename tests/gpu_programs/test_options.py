"""What XLA makes of the options of a program on GPUs that are not there."""

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute
from trainer.distribute.placement.described import EXTRA, is_plugin_installed
from trainer.tools.plan.planned_phase import planned_phase, strategy_over
from trainer.tools.plan.program_contents import collectives_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_plugin_installed(), reason="JAX's CUDA plugin is not installed: "
                       f"pip install 'trainer-jax[{EXTRA}]'"),
]


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.Embed(1000, 16)(x).mean(axis=1))


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(1)(x)


def operations_of(model, batch):
    """Returns which operations a train step on one H100 has, fused or not."""
    strategy = strategy_over(distribute.OneDeviceStrategy(), "1xh100")
    program = planned_phase(model, strategy, "train", batch).program
    return [instruction.operation for computation in program.computations.values() for instruction in computation]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_an_embedding_is_sorted_in_a_deterministic_step(deterministic):
    model = trainer.Model(Tokens())
    model.compile("sgd", "mse", deterministic=deterministic, steps_per_execution=1)
    operations = operations_of(model, (np.zeros((16, 8), np.int32), np.zeros((16, 1), np.float32)))
    assert operations.count("scatter") == 1 and ("sort" in operations) == deterministic


def test_a_step_with_counting_metrics_has_no_loop_and_no_scatter():
    model = trainer.Sequential([nn.Dense(1), nn.sigmoid])
    model.compile("sgd", "binary_crossentropy", steps_per_execution=1, weighted_metrics=[
        trainer.metrics.AUC(), trainer.metrics.Precision(), trainer.metrics.BinaryIoU()])
    operations = operations_of(
        model, (np.zeros((64, 8), np.float32), np.zeros((64, 1), np.float32), np.ones(64, np.float32)))
    assert not {"while", "scatter"} & set(operations)


def test_gradients_are_reduced_in_packs_beside_other_work():
    def packs(**options):
        communication = distribute.NcclAllReduce(options=distribute.CommunicationOptions(**options))
        strategy = strategy_over(distribute.MirroredStrategy(cross_device_ops=communication), "8xh100")
        batch = np.zeros((64, 512), np.float32), np.zeros((64, 1), np.float32)
        found = collectives_of(planned_phase(model, strategy, "train", batch).program, 8)
        return [each.kernels_between for each in found]

    model = trainer.Model(Deep())
    model.compile("sgd", "mse", steps_per_execution=1)
    whole, small, without = packs(), packs(bytes_per_pack=2**20), packs(bytes_per_pack=2**20, overlap=False)
    assert len(whole) < len(small) == len(without)
    assert any(small) and not any(without)
