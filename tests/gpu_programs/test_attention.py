"""Attention in programs for GPUs: cuDNN's kernel, which stores no scores."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, losses, models
from trainer.distribute.placement.described import EXTRA, is_plugin_installed
from trainer.distribute.placement.described_cudnn import traced_for
from trainer.distribute.placement.gpu_kinds import GPU_KINDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_plugin_installed(), reason="JAX's CUDA plugin is not installed: "
                       f"pip install 'trainer-jax[{EXTRA}]'"),
]
TOKENS = jax.ShapeDtypeStruct((16, 1024), jnp.int32)


def planned(strategy, topology="8xh100", precision="mixed_bfloat16", **options):
    model = trainer.Model(models.TransformerLM(512, num_layers=1, d_model=256, num_heads=4, **options))
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True), precision=precision,
                  steps_per_execution=1)
    return strategy.plan(model, (TOKENS, TOKENS), topology, verbose=False, alternatives=False)


@pytest.mark.parametrize("strategy", [distribute.MirroredStrategy, distribute.FullyShardedStrategy])
def test_scores_are_not_stored_in_16_bits(strategy):
    with_cudnn, without = (planned(strategy(), attention=attention) for attention in ("auto", "xla"))
    scores = 2 * 4 * 1024**2 * 4  # of a device, in float32
    assert without.memory.temporary - with_cudnn.memory.temporary > 1.5 * scores
    # cuDNN skips the half of the scores that the mask excludes, and computes the rest once more for the gradients.
    assert 0.5 * without.flops < with_cudnn.flops < without.flops
    assert [row.kind for row in with_cudnn.collectives] == [row.kind for row in without.collectives]


def test_float32_has_no_such_kernel():
    found, expected = (planned(distribute.MirroredStrategy(), precision=None, attention=attention).memory
                       for attention in ("auto", "xla"))
    assert found == expected


def test_a_users_module_is_planned_with_it():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            query, key, value = (nn.DenseGeneral((4, 64), dtype=jnp.bfloat16)(x) for _ in range(3))
            return jax.nn.dot_product_attention(query, key, value, implementation="cudnn").mean((1, 2, 3))[:, None]

    model = trainer.Model(Net())
    model.compile("sgd", "mse", steps_per_execution=1)
    batch = jax.ShapeDtypeStruct((16, 256, 32), jnp.float32), jax.ShapeDtypeStruct((16, 1), jnp.float32)
    plan = distribute.MirroredStrategy().plan(model, batch, "8xh100", verbose=False, alternatives=False)
    assert plan.flops >= 7 * 2 * (16 / 8) * 4 * 256**2 * 64


def test_jax_still_asks_this_machine():
    x = jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)

    def attend(x):
        return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")

    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.eval_shape(attend, x)
    with traced_for(GPU_KINDS["h100"]):
        assert jax.eval_shape(attend, x).shape == x.shape


@pytest.mark.parametrize("options", [{}, {"logits_chunk_size": 128}])
def test_all_products_of_a_language_model_are_in_the_dtype_that_was_asked_for(options):
    plan = planned(distribute.OneDeviceStrategy(), "1xh100", **options)
    assert set(plan.product_flops) == {"bfloat16"}
