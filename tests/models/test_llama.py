"""Llama: published sizes, rotary positions, shared keys and values, and layouts. Its numbers are compared with those of
`transformers` in `test_hf_weights.py`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from trainer import models
from trainer.models.text.llama import rotated

LLAMA = models.Llama(vocab_size=12, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, mlp_dim=24, max_len=12)
TOKENS = np.random.default_rng(0).integers(0, 12, (3, 8))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("module", "count"), [
    (models.Llama2_7B(), 6_738_415_616), (models.Llama31_8B(), 8_030_261_248), (models.Llama32_1B(), 1_235_814_400)])
def test_published_sizes_have_the_published_numbers_of_parameters(module, count):
    shapes = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == count


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, models.Llama3Scaling(original_max_len=8)])
def test_a_score_depends_on_the_distance_of_positions_alone(scaling):
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(first, second):
        turned = (rotated(x, jnp.array([position]), 100.0, scaling) for x, position in ((query, first), (key, second)))
        return float(jnp.vdot(*turned))

    assert score(5, 3) == pytest.approx(score(9, 7), abs=1e-5)
    assert abs(score(5, 3) - score(5, 4)) > 1e-2
    assert score(4, 4) == pytest.approx(float(np.vdot(query, key)), abs=1e-5)


def test_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    frequencies = 2 * np.pi / np.array([10.0, 8192 / 4, 8192 / 2.5, 8192.0, 1e6])
    found = models.Llama3Scaling().scaled(frequencies)
    np.testing.assert_allclose(found / frequencies, [1, 1, 0.5 + 0.5 / 8, 1 / 8, 1 / 8], rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_computes_nearly_the_same_and_returns_float32():
    variables = jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, LLAMA.init(jax.random.key(0), TOKENS))
    exact, rounded = (module.apply(variables, TOKENS) for module in (LLAMA, LLAMA.clone(dtype=jnp.bfloat16)))
    assert rounded.dtype == jnp.float32
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(("attributes", "message"), [
    ({"num_heads": 3}, r"multiple of `num_heads`. Received: d_model=16, num_heads=3"),
    ({"num_heads": 16}, r"an even number of them. Received: d_model=16, num_heads=16"),
    ({"num_kv_heads": 3}, r"multiple of `num_kv_heads`. Received: num_heads=4, num_kv_heads=3"),
    ({"max_len": 7}, r"Llama expects rows of 1 to 7 tokens"),
    ({"num_kv_heads": 0}, r"`num_kv_heads` of Llama must be a whole number of at least 1, or None. Received: 0"),
    ({"rope_theta": 0}, r"`rope_theta` of Llama must be a number above 0. Received: 0"),
])
def test_what_cannot_work_is_refused(attributes, message):
    with pytest.raises(ValueError, match=message):
        LLAMA.clone(**attributes).init(jax.random.key(0), TOKENS)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("attributes", "options"), [
    ({}, {"remat": True}), ({"logits_chunk_size": 3}, {}), ({"logits_chunk_size": 3, "tied_embedding": True}, {})],
    ids=["remat", "chunks", "tied"])
def test_steps_that_save_memory_are_the_same(attributes, options):
    results = []
    for chosen, compiled in ((attributes, options), ({**attributes, "logits_chunk_size": None}, {})):
        with trainer.distribute.OneDeviceStrategy().scope():
            model = trainer.Model(LLAMA.clone(**chosen))
            model.compile(trainer.optimizers.SGD(0.1),
                          loss=trainer.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
        for _ in range(2):
            model.train_on_batch(TOKENS[:, :-1], TOKENS[:, 1:])
        results.append(model.get_weights())
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), *results)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("module", "sample", "split"), [
    (LLAMA, TOKENS, 2 * 7 + 2), (LLAMA.clone(tied_embedding=True), TOKENS, 2 * 7 + 1),
    (models.TransformerLM(vocab_size=11, num_layers=2, d_model=16, num_heads=4, max_len=12), TOKENS, 2 * 10),
    (models.TransformerEncoder(vocab_size=12, num_layers=2, d_model=16, num_heads=4, max_len=12), TOKENS, 2 * 10),
    (models.ViTB16(patch_size=4, width=16, depth=2, num_heads=4, mlp_width=32, num_classes=3),
     np.zeros((1, 8, 8, 3), np.float32), 2 * 6),
], ids=["llama", "tied", "gpt2", "bert", "vit"])
def test_layouts_split_each_block_and_every_rule_matches(module, sample, split):
    layouts = models.layout_map(module, "tensor")
    strategy = trainer.distribute.ModelParallelStrategy(
        {"replica": 1, "tensor": 2}, ["cpu:0", "cpu:1"], layout_map=layouts)
    with strategy.scope():
        shapes = trainer.Model(module).state_shapes(sample)
    shardings = jax.tree.leaves(strategy.state_shardings(shapes).params)
    assert sum(any(sharding.spec) for sharding in shardings) == split
    assert all("tensor" in entries for entries in layouts.values())


def test_other_modules_have_no_layouts():
    with pytest.raises(TypeError, match=r"There are layouts for TransformerLM, .*Received: a value of type MLP"):
        models.layout_map(models.MLP(num_classes=2))
