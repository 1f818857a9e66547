"""The Transformers: sizes, one block against NumPy, who sees what, generation, and training under strategies."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer
from trainer import models
from trainer.core.ambient import state
from trainer.models.layers import dot_product_attention as attention_kernels
from trainer.models.text.transformer_blocks import TransformerBlock

rng = np.random.default_rng(0)
LM = models.TransformerLM(vocab_size=11, num_layers=2, d_model=16, num_heads=4, max_len=12)
ENCODER = models.TransformerEncoder(vocab_size=11, num_layers=2, d_model=16, num_heads=4, max_len=12, num_classes=3)
TOKENS = rng.integers(1, 11, (3, 8))


def params_of(module, *inputs, scale=8.0):
    """Returns weights large enough that attention tells positions apart."""
    params = module.init(jax.random.key(0), *(inputs or (TOKENS,)))["params"]
    return jax.tree.map(lambda leaf: scale * leaf if leaf.ndim > 1 else leaf + 0.1 * jnp.arange(leaf.size) / leaf.size,
                        params)


def count(module, tokens):
    shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_published_sizes_have_the_published_numbers_of_parameters():
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    assert count(models.TransformerLM(vocab_size=50257), tokens) == 124_439_808
    body = models.TransformerEncoder(vocab_size=30522, include_top=False, pooling="first")
    assert count(body, tokens) == 109_482_240
    assert count(body.clone(include_top=True, num_classes=5), tokens) == 109_482_240 + 768 * 5 + 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_outputs_are_float32_of_the_expected_shapes(dtype):
    lm, encoder = LM.clone(dtype=dtype), ENCODER.clone(dtype=dtype)
    logits, probabilities = (module.apply({"params": params_of(module)}, TOKENS) for module in (lm, encoder))
    assert logits.shape == (3, 8, 11) and logits.dtype == jnp.float32
    assert probabilities.shape == (3, 3) and probabilities.dtype == jnp.float32
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_computes_nearly_the_same():
    exact, rounded = (module.apply({"params": params_of(LM)}, TOKENS) for module in (LM, LM.clone(dtype=jnp.bfloat16)))
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("pooling", "shape"), [(None, (3, 8, 16)), ("first", (3, 16)), ("avg", (3, 16)),
                                                ("max", (3, 16))])
def test_an_encoder_without_its_top_returns_features(pooling, shape):
    body = ENCODER.clone(include_top=False, pooling=pooling)
    assert body.init_with_output(jax.random.key(0), TOKENS)[0].shape == shape


# --- numbers ----------------------------------------------------------------------------------------------------------


def normalized(x, params, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * params["scale"] + params["bias"]


def gelu(x, approximate):
    if approximate:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def dense(x, params):
    return x @ params["kernel"] + params["bias"]


def block_by_hand(params, x, *, heads, norm_first, is_causal, mask):
    """One sequence after the other, one head after the other, one position after the other, in float64."""
    epsilon = 1e-5 if norm_first else 1e-12
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def attention(rows):
        out = np.zeros_like(rows)
        for row, sequence in enumerate(rows):
            query, key, value = (dense(sequence, params["attention"][name]) for name in ("query", "key", "value"))
            size = sequence.shape[1] // heads
            for part in (slice(head * size, (head + 1) * size) for head in range(heads)):
                for position in range(len(sequence)):
                    seen = [other for other in range(len(sequence))
                            if mask[row, other] and (other <= position or not is_causal)]
                    scores = np.exp(key[seen, part] @ query[position, part] / np.sqrt(size))
                    out[row, position, part] = scores @ value[seen, part] / scores.sum()
        return dense(out, params["attention"]["out"])

    def perceptron(rows):
        return dense(gelu(dense(rows, params["mlp_in"]), norm_first), params["mlp_out"])

    for part, norm in ((attention, params["attention_norm"]), (perceptron, params["mlp_norm"])):
        if norm_first:
            x = x + part(normalized(x, norm, epsilon))
        else:
            x = normalized(x + part(x), norm, epsilon)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_block_computes_what_numpy_does(kind):
    is_gpt = kind == "gpt"
    block = TransformerBlock(num_heads=4, mlp_dim=32, norm_first=is_gpt, norm_epsilon=1e-5 if is_gpt else 1e-12,
                             activation=lambda x: jax.nn.gelu(x, approximate=is_gpt), is_causal=is_gpt)
    x = rng.normal(size=(2, 6, 16)).astype(np.float32)
    mask = np.ones((2, 6), bool) if is_gpt else np.arange(6) < np.array([[6], [4]])
    params = params_of(block, x, scale=5.0)
    found, _ = block.apply({"params": params}, x, None if is_gpt else mask)
    expected = block_by_hand(params, x.astype(np.float64), heads=4, norm_first=is_gpt, is_causal=is_gpt, mask=mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_output_layer_is_the_table_of_tokens():
    params = params_of(LM.clone(num_layers=0))
    x = params["token_embedding"]["embedding"][TOKENS] + params["position_embedding"]["embedding"][:8]
    expected = normalized(np.asarray(x), params["final_norm"], 1e-5) @ params["token_embedding"]["embedding"].T
    np.testing.assert_allclose(LM.clone(num_layers=0).apply({"params": params}, TOKENS), expected, rtol=1e-4, atol=1e-4)


# --- who sees what ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_later_tokens_do_not_change_earlier_logits():
    changed = TOKENS.copy()
    changed[:, 5:] = TOKENS[:, 5:] % 10 + 1
    first, second = (LM.apply({"params": params_of(LM)}, tokens) for tokens in (TOKENS, changed))
    np.testing.assert_allclose(first[:, :5], second[:, :5], atol=1e-6)
    assert (np.abs(first[:, 5:] - second[:, 5:]).max((0, 2)) > 1e-2).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"include_top": False, "pooling": "avg"},
                                     {"include_top": False, "pooling": "max"}])
def test_padding_does_not_change_results(options):
    module = ENCODER.clone(**options)
    variables = {"params": params_of(module)}
    expected = module.apply(variables, TOKENS)
    padded = np.pad(TOKENS, ((0, 0), (0, 4)))
    np.testing.assert_allclose(module.apply(variables, padded), expected, rtol=1e-5, atol=1e-6)
    masked = np.pad(TOKENS, ((0, 0), (0, 4)), constant_values=7)
    np.testing.assert_allclose(module.apply(variables, masked, mask=padded > 0), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(module.clone(mask_token=None).apply(variables, padded) - expected).max() > 1e-4


@pytest.mark.slow
def test_types_of_tokens_count():
    variables = {"params": params_of(ENCODER)}
    first, second = (ENCODER.apply(variables, TOKENS, np.full_like(TOKENS, number)) for number in (0, 1))
    np.testing.assert_array_equal(first, ENCODER.apply(variables, TOKENS))
    assert np.abs(first - second).max() > 1e-4


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("module", [LM, ENCODER])
def test_dropout_acts_in_training_only(module):
    dropping, variables = module.clone(dropout_rate=0.5), {"params": params_of(module)}
    first, second = (dropping.apply(variables, TOKENS, training=True, rngs={"dropout": jax.random.key(seed)})
                     for seed in (1, 2))
    assert np.abs(first - second).max() > 1e-4
    np.testing.assert_array_equal(dropping.apply(variables, TOKENS), module.apply(variables, TOKENS))


@pytest.mark.parametrize(("module", "inputs", "error", "message"), [
    (LM, [TOKENS[0]], ValueError, r"shape \(rows, length\). Received: shape \(8,\).*tokens\[None\]"),
    (LM, [np.ones((2, 13), int)], ValueError, r"1 to 12 tokens. Received: shape \(2, 13\).*larger `max_len`"),
    (LM, [TOKENS.astype(np.float32)], TypeError, r"whole numbers. Received: float32.*astype"),
    (LM.clone(num_heads=3), [TOKENS], ValueError, r"multiple of `num_heads`. Received: d_model=16, num_heads=3"),
    (ENCODER, [TOKENS, TOKENS[:, :3]], ValueError, r"`token_types` must be of the shape.*\(3, 8\).*\(3, 3\)"),
    (ENCODER, [TOKENS, None, TOKENS[:2]], ValueError, r"`mask` must be of the shape.*\(2, 8\)"),
    (ENCODER.clone(include_top=False, pooling="mean"), [TOKENS], ValueError, r"`pooling` must be None.*'mean'"),
])
def test_what_cannot_be_read_is_refused(module, inputs, error, message):
    with pytest.raises(error, match=message):
        module.init(jax.random.key(0), *inputs)


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    params = params_of(LM)
    # Otherwise a token is followed by itself, as the output layer is the table of tokens.
    return LM, {**params, "position_embedding": jax.tree.map(lambda table: 20 * table, params["position_embedding"])}


def recomputed(pair, prompt, count):
    module, params = pair
    tokens = prompt
    for _ in range(count):
        logits = module.apply({"params": params}, tokens)[:, -1]
        tokens = np.concatenate([tokens, np.asarray(logits).argmax(-1)[:, None]], axis=1)
    return tokens


@pytest.mark.slow
def test_greedy_generation_is_that_of_computing_all_again_for_each_token(pair):
    found = models.generate(pair, TOKENS[:, :4], 8, temperature=0)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, recomputed(pair, TOKENS[:, :4], 8))
    assert len(np.unique(found[:, 4:])) > 3, "the weights must lead to several tokens"


@pytest.mark.slow
def test_a_cache_gives_the_logits_of_the_whole_sequence(pair):
    module, params = pair
    cache, expected = module.empty_cache(3, 8, jnp.float32), module.apply({"params": params}, TOKENS)
    for start, end in ((0, 3), (3, 4), (4, 8)):
        logits, cache = module.apply({"params": params}, TOKENS[:, start:end], cache, start, method="next_logits")
        np.testing.assert_allclose(logits, expected[:, end - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_seed_draws_the_same_and_another_draws_others(pair):
    drawn = [models.generate(pair, TOKENS[:, :4], 8, seed=seed, temperature=3.0) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()


@pytest.mark.slow
def test_tokens_are_drawn_by_their_probabilities(pair):
    module, params = pair
    prompt = np.repeat(TOKENS[:1, :4], 3000, axis=0)
    logits = np.asarray(module.apply({"params": params}, prompt[:1])[0, -1], np.float64)
    ordered = np.argsort(-logits)

    def frequencies(**options):
        return np.bincount(models.generate(pair, prompt, 1, **options)[:, -1], minlength=11) / 3000

    def softmax(logits):
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    hot = logits / 40
    np.testing.assert_allclose(frequencies(temperature=40), softmax(hot), atol=0.03)
    three = np.where(np.isin(np.arange(11), ordered[:3]), hot, -np.inf)
    np.testing.assert_allclose(frequencies(temperature=40, top_k=3), softmax(three), atol=0.03)
    nucleus = 1 + int((softmax(hot)[ordered].cumsum() < 0.4).sum())
    kept = np.where(np.isin(np.arange(11), ordered[:nucleus]), hot, -np.inf)
    assert 1 < nucleus < 8
    np.testing.assert_allclose(frequencies(temperature=40, top_p=0.4), softmax(kept), atol=0.03)
    np.testing.assert_allclose(frequencies(top_k=1), np.arange(11) == ordered[0])


@pytest.mark.slow
def test_a_row_ends_with_its_last_token(pair):
    free = models.generate(pair, TOKENS[:, :4], 8, temperature=0)
    eos = int(free[0, 6])
    found = models.generate(pair, TOKENS[:, :4], 8, temperature=0, eos_token=eos)
    for row, expected in zip(found[:, 4:], free[:, 4:], strict=True):
        ends = np.flatnonzero(expected == eos)
        length = ends[0] + 1 if len(ends) else len(expected)
        np.testing.assert_array_equal(row[:length], expected[:length])
        assert (row[length:] == eos).all()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("prompt", "options", "error", "message"), [
    ([[1, 2], [3]], {}, ValueError, r"several lengths. Call `generate` for the rows of each length"),
    (np.ones((1, 6), int), {}, ValueError, r"`max_len`=12 together. Received: prompts of 6.*max_new_tokens=7.*fewer"),
    ([1, 2], {}, ValueError, r"shape \(rows, length\).*Received: shape \(2,\).*prompt\[None\]"),
    (np.zeros((1, 0), int), {}, ValueError, r"not empty. Received: shape \(1, 0\)"),
    ([[0.5]], {}, TypeError, r"whole numbers. Received: dtype float64"),
    ([[11]], {}, ValueError, r"from 0 to 10. Received: tokens from 11 to 11"),
    ([[1]], {"temperature": -1}, ValueError, r"`temperature` must be at least 0.*-1"),
    ([[1]], {"top_k": 12}, ValueError, r"`top_k` must be at least 1 and at most 11. Received: top_k=12"),
    ([[1]], {"top_p": 0}, ValueError, r"`top_p` must be above 0.*top_p=0"),
    ([[1]], {"seed": 0.5}, TypeError, r"`seed` must be a whole number. Received: float"),
])
def test_what_cannot_be_continued_is_refused(pair, prompt, options, error, message):
    with pytest.raises(error, match=message):
        models.generate(pair, prompt, 7, **options)


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [["hello", "world"]], np.array(["hello"])])
@pytest.mark.parametrize("arguments", [(), (3,)])
def test_text_is_refused_before_anything_else(prompt, arguments):
    with pytest.raises(TypeError, match=r"token ids.*Received: text\..*`np\.array\(\[tokenizer\.encode\(text\)\]\)`"):
        models.generate(models.MLP(num_classes=2), prompt, *arguments)


@pytest.mark.slow
def test_a_missing_number_of_tokens_is_refused(pair):
    with pytest.raises(TypeError, match=r"`max_new_tokens` is missing: .*`generate\(model, prompt, 20\)`"):
        models.generate(pair, [[1]])


def test_what_is_no_language_model_is_refused():
    for model in (trainer.Model(models.MLP(num_classes=2)), models.MLP(num_classes=2), (models.MLP(num_classes=2), {})):
        with pytest.raises(TypeError, match=r"takes a `trainer.Model` of a `models.TransformerLM`, or a pair"):
            models.generate(model, [[1]], 1)


# --- training ---------------------------------------------------------------------------------------------------------


def mirrored(replicas):
    return trainer.distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


def sharded(replicas):
    return trainer.distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(replicas)])


def built(strategy, module, **options):
    with strategy.scope():
        model = trainer.Model(module)
        from_logits = isinstance(module, models.TransformerLM)
        model.compile(options.pop("optimizer", optax.sgd(0.1)),
                      trainer.losses.SparseCategoricalCrossentropy(from_logits=from_logits), metrics=["accuracy"],
                      **options)
    return model


@pytest.mark.slow
def test_periodic_tokens_are_learnt_and_continued():
    lm = built(mirrored(2), models.TransformerLM(vocab_size=50, num_layers=1, d_model=32, num_heads=4, max_len=16),
               optimizer="adam")
    tokens = np.tile(np.arange(17) % 5, (64, 1))
    history = lm.fit(tokens[:, :-1], tokens[:, 1:], batch_size=16, epochs=30, verbose=0).history
    assert history["accuracy"][-1] > 0.95
    np.testing.assert_array_equal(models.generate(lm, tokens[:2, :6], 10, temperature=0), tokens[:2, :16])


@pytest.mark.slow
@pytest.mark.parametrize(("module", "strategy", "options"), [
    (LM, mirrored, {}), (ENCODER, mirrored, {}), (LM, sharded, {}), (ENCODER, sharded, {}),
    (LM, sharded, {"remat": True}), (ENCODER, mirrored, {"remat": True}), (LM, mirrored, {"microbatches": 2})])
def test_training_has_the_numbers_of_one_device(module, strategy, options):
    tokens = rng.integers(1, 11, (12, 9))
    y = tokens[:, 1:] if module is LM else tokens[:, 0] % 3
    runs = []
    for where, given in ((mirrored(1), {}), (strategy(2), options)):
        model = built(where, module, **given)
        losses = model.fit(tokens[:, :-1], y, batch_size=8, epochs=2, verbose=0).history["loss"]
        runs.append((losses, model.get_weights(), model))
    for one, two in zip(jax.tree.leaves(runs[0][:2]), jax.tree.leaves(runs[1][:2]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)
    if module is LM:
        first, second = (models.generate(run[2], tokens[:2, :4], 4, temperature=0) for run in runs)
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("module", [LM, ENCODER], ids=["lm", "encoder"])
def test_mixed_precision_trains(module):
    tokens = rng.integers(1, 11, (16, 9))
    model = built(mirrored(2), module, precision="mixed_bfloat16", optimizer="adam")
    y = tokens[:, 1:] if module is LM else tokens[:, 0] % 3
    history = model.fit(tokens[:, :-1], y, batch_size=8, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert {leaf.dtype for leaf in jax.tree.leaves(model.state.params)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_generation_computes_with_the_weights_of_predict():
    tokens = rng.integers(1, 11, (16, 9))
    model = built(mirrored(2), LM, ema_decay=0.5, optimizer=optax.adam(0.05))
    model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=8, epochs=3, verbose=0)
    expected = tokens[:, :4]
    for _ in range(4):
        expected = np.concatenate([expected, model.predict(expected, verbose=0)[:, -1].argmax(-1)[:, None]], axis=1)
    np.testing.assert_array_equal(models.generate(model, tokens[:, :4], 4, temperature=0), expected)


@pytest.mark.parametrize(("platform", "replicas", "is_fused"), [
    ("gpu", 8, True), ("gpu", 4, False), ("cpu", 8, False)])
def test_the_fused_kernel_is_for_gpus_that_split_rows_alone(platform, replicas, is_fused):
    mesh = SimpleNamespace(size=8, devices=np.array([SimpleNamespace(platform=platform)] * 8))
    with state.replaced(strategy=SimpleNamespace(mesh=mesh, replica_count=replicas)):
        assert attention_kernels._is_for_cuda() == is_fused
