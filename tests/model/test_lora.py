"""LoRA: adapters beside the weights of any module, trained, saved and merged alone."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer.core.tree_paths import named_leaves
from trainer.distribute import FullyShardedStrategy, ModelParallelStrategy
from trainer.testing import LocalCluster, assert_strategies_equal

STEPS, RANK, ALPHA, TOKENS = 10, 2, 3.0, 11
IDS = np.random.default_rng(0).integers(0, TOKENS, (STEPS * 4, 5))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
        return nn.tanh(nn.Dense(x.shape[-1], name="up")(x)), None


class Transformer(nn.Module):
    """Scanned blocks, and an embedding that also gives the logits."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(TOKENS, 8, name="embed")
        split = {"params": True, "dropout": True}
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs=split, length=3, unroll=1)(name="blocks")
        return embed.attend(nn.LayerNorm(name="norm")(blocks(embed(ids), None)[0]))


class NNXTransformer(nnx.Module):
    """An embedding, attention and a dense layer, as NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        return self.embed.attend(nnx.tanh(self.up(x + self.attention(x))))


MODULES = {"linen": (Transformer, IDS), "nnx": (lambda: NNXTransformer(nnx.Rngs(3)), IDS)}
WEIGHTS = {"linen": ["embed", "attention", "up"], "nnx": ["embed", "attention", "up"]}


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1))


def base_of(kind):
    module, ids = MODULES[kind]
    model = trainer.Model(module(), seed=1)
    model.build(ids[:1])
    return model


@functools.cache
def shared_base(kind):
    """A base of one device that no test changes."""
    return base_of(kind)


def adapted(kind="linen", base=None, **options):
    model = trainer.lora(base or shared_base(kind), RANK, WEIGHTS[kind], ALPHA, **options)
    # Adapters whose products are not zero, as after some steps.
    leaves = named_leaves(model.state.params)
    moved = {path: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape))
             if "lora_" in path else leaf for path, leaf in leaves.items()}
    model.state = model.state.replace(
        params=jax.tree.unflatten(jax.tree.structure(model.state.params), list(moved.values())))
    return model


def compiled(model, **options):
    model.compile(optimizer(), logits_loss(), **options)
    return model


def merged_by_hand(params):
    """Returns the weights with the products of their adapters added, computed layer by layer."""
    merged = dict(params)
    for path in params:
        layer, _, name = path.rpartition("/")
        if name in ("kernel", "embedding") and f"{layer}/lora_a" in params:
            a, b = params[f"{layer}/lora_a"], params[f"{layer}/lora_b"]
            stack = 1 if layer.startswith("blocks") else 0
            product = jnp.tensordot(a, b, 1) if not stack else jnp.stack(
                [jnp.tensordot(one, other, 1) for one, other in zip(a, b, strict=True)])
            merged[path] = params[path] + ALPHA / RANK * product
    return {path: leaf for path, leaf in merged.items() if "lora_" not in path}


def loop_by_hand(kind, model):
    """Trains the adapters of a model in a loop of plain JAX and optax; returns its losses and parameters."""
    plain = shared_base(kind)
    structure = jax.tree.structure(plain.state.params)
    all_params = named_leaves(model.state.params)
    base = {path: leaf for path, leaf in all_params.items() if "lora_" not in path}
    trained = {path: leaf for path, leaf in all_params.items() if "lora_" in path}
    tx = optimizer()

    def loss_of(trained, ids):
        weights = merged_by_hand({**base, **trained})
        params = jax.tree.unflatten(structure, [weights[path] for path in named_leaves(plain.state.params)])
        logits = plain.apply(params, plain.state, ids, training=True)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    @jax.jit
    def step(trained, opt_state, ids):
        loss, grads = jax.value_and_grad(loss_of)(trained, ids)
        updates, opt_state = tx.update(grads, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, loss

    opt_state, losses = tx.init(trained), []
    for start in range(0, len(IDS), 4):
        trained, opt_state, loss = step(trained, opt_state, IDS[start:start + 4])
        losses.append(float(loss))
    return np.mean(losses), {**base, **trained}


def fitted(model, **options):
    return model.fit(IDS, IDS, batch_size=4, shuffle=False, verbose=0, **options).history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_adapters_train_as_in_a_loop_by_hand_and_merge_to_equal_outputs(kind, tmp_path):
    base = shared_base(kind)
    before = jax.tree.map(np.array, base.state.params)
    model = compiled(adapted(kind, base))
    loss, params = loop_by_hand(kind, model)
    assert fitted(model) == pytest.approx([loss], rel=1e-6)
    for path, leaf in named_leaves(model.state.params).items():
        np.testing.assert_allclose(leaf, params[path], rtol=1e-5, atol=1e-6, err_msg=path)
        if "lora_" not in path:
            np.testing.assert_array_equal(leaf, named_leaves(before)[path])

    # No optimizer state of frozen weights, and files of the adapters alone.
    moments = [path for path in named_leaves(model.state.opt_state) if "/mu/" in path]
    assert moments and all("lora_" in path for path in moments)
    model.save_adapters(tmp_path / "adapters.safetensors")
    other = trainer.lora(base, RANK, WEIGHTS[kind], ALPHA)
    np.testing.assert_allclose(other.predict(IDS, verbose=0), base.predict(IDS, verbose=0), atol=1e-6)
    other.load_adapters(tmp_path / "adapters.safetensors")
    outputs = model.predict(IDS, verbose=0)
    np.testing.assert_array_equal(other.predict(IDS, verbose=0), outputs)
    merged = model.merge()
    assert type(merged) is trainer.Model
    assert named_leaves(merged.state.params).keys() == named_leaves(before).keys()
    np.testing.assert_allclose(merged.predict(IDS, verbose=0), outputs, rtol=1e-5, atol=2e-5)
    assert np.abs(outputs - base.predict(IDS, verbose=0)).max() > 0.1


@pytest.mark.slow
def test_no_gradient_of_a_frozen_weight_is_computed():
    model = trainer.lora(trainer.Sequential([nn.Dense(7), nn.Dense(13), nn.Dense(3)]), 2)
    model.compile("adam", "mse")
    x, y = np.ones((4, 5), np.float32), np.ones((4, 3), np.float32)
    model.build(x)
    program = str(jax.make_jaxpr(model.train_step)(model.state, (x, y)).jaxpr)
    outputs = [line.split("=")[0] for line in program.splitlines() if "dot_general" in line]
    assert any("13,2" in line or "2,13" in line for line in outputs)
    assert not any(shape in line for line in outputs for shape in ("[7,13]", "[13,7]", "[13,3]", "[3,13]"))


class Custom(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return ((y_pred - y) ** 2).mean()


@pytest.mark.sampled(2)
@pytest.mark.every_case
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
def test_a_head_is_trained_too_and_a_class_of_ones_own_stays(module, tmp_path):
    last = "Dense_1" if module is LinenMLP else "last"
    base = Custom(module(batch_norm=True), seed=2)
    x, y, _ = classification(24)
    y = np.eye(3, dtype=np.float32)[y]
    base.build(x[:1])
    model = trainer.lora(base, 2, ["Dense_0" if module is LinenMLP else "first"], train=last)
    assert isinstance(model, Custom) and isinstance(model, trainer.LoraModel)
    before = jax.tree.map(np.array, (model.state.params, model.state.model_state))
    model.compile(optax.sgd(0.1), weighted_metrics=[])
    model.fit(x, y, batch_size=8, verbose=0)
    params, state = named_leaves(before[0]), named_leaves(before[1])
    after = named_leaves(model.state.params)
    changed = {path for path, leaf in after.items() if not np.array_equal(leaf, params[path])}
    assert {path.rpartition("/")[2] for path in changed} == {"lora_b", "lora_a", "kernel", "bias"}
    assert all(last in path or "lora_" in path for path in changed)
    # Running averages of a frozen BatchNorm stay.
    assert all(np.array_equal(leaf, state[path]) for path, leaf in named_leaves(model.state.model_state).items())
    model.save_adapters(tmp_path / "a.safetensors")
    fresh = trainer.lora(base, 2, ["Dense_0" if module is LinenMLP else "first"], train=last)
    fresh.load_adapters(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(fresh.predict(x, verbose=0), model.predict(x, verbose=0))
    assert type(model.merge()) is Custom


def build_for_strategies():
    return compiled(adapted("linen", base_of("linen"), dropout=0.3), microbatches=2)


def strategies():
    devices = [f"cpu:{index}" for index in range(4)]
    return [FullyShardedStrategy(devices, min_shard_bytes=0),
            ModelParallelStrategy({"replica": 2, "model": 2}, devices=devices, layout_map={
                "**/up/kernel": (None, None, "model")})]


@pytest.mark.slow
def test_every_strategy_gives_one_devices_numbers():
    """Dropout of adapters in a scan and microbatches included."""
    assert_strategies_equal(build_for_strategies, (IDS[:18], IDS[:18]), [mirrored(2), *strategies()], batch_size=8)
    with FullyShardedStrategy(["cpu:0", "cpu:1"], min_shard_bytes=0).scope():
        model = adapted("linen", base_of("linen"))
    outputs = model.predict(IDS, verbose=0)
    np.testing.assert_allclose(model.merge().predict(IDS, verbose=0), outputs, rtol=1e-5, atol=2e-5)
    kernel = model.merge().state.params["blocks"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 2 == kernel.size


def in_a_process(folder):
    strategies = [trainer.distribute.MultiWorkerMirroredStrategy(), FullyShardedStrategy(min_shard_bytes=0)]
    assert_strategies_equal(build_for_strategies, (IDS[:18], IDS[:18]), strategies, batch_size=8)
    with strategies[1].scope():
        model = adapted("linen", base_of("linen"))
    model.save_adapters(f"{folder}/adapters.safetensors")
    model.merge().save_weights(f"{folder}/merged.safetensors")
    return True


@pytest.mark.exhaustive
@pytest.mark.processes
def test_two_processes_give_one_devices_numbers_and_files(tmp_path):
    assert LocalCluster(2, 1, 300.0).run(in_a_process, str(tmp_path)) == [True, True]
    model, merged = trainer.lora(shared_base("linen"), RANK, WEIGHTS["linen"], ALPHA), base_of("linen")
    model.load_adapters(tmp_path / "adapters.safetensors")
    merged.load_weights(tmp_path / "merged.safetensors")
    np.testing.assert_allclose(model.predict(IDS, verbose=0), merged.predict(IDS, verbose=0), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(model.predict(IDS, verbose=0), adapted().predict(IDS, verbose=0), rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    class Stop(trainer.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                raise KeyboardInterrupt

    whole, stopped, resumed = (compiled(adapted(dropout=0.2), ema_decay=0.9) for _ in range(3))
    fitted(whole)
    with pytest.raises(KeyboardInterrupt):
        fitted(stopped, callbacks=[trainer.callbacks.BackupAndRestore(tmp_path, save_freq=3), Stop()])
    fitted(resumed, callbacks=[trainer.callbacks.BackupAndRestore(tmp_path, save_freq=3)])
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)
    jax.tree.map(np.testing.assert_array_equal, whole.state.opt_state, resumed.state.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_dropout_of_adapters_is_active_in_training_alone(kind):
    plain, dropped = (adapted(kind, dropout=rate) for rate in (0.0, 0.5))
    np.testing.assert_array_equal(plain(IDS), dropped(IDS))
    assert np.abs(np.asarray(plain(IDS, training=True)) - dropped(IDS, training=True)).max() > 1e-3
    assert [weight.path for weight in plain.trainable_weights] == [weight.path for weight in dropped.trainable_weights]


@pytest.mark.slow
def test_with_moving_averages_a_merged_model_and_saved_adapters_predict_the_same(tmp_path):
    model = compiled(adapted(), ema_decay=0.9)
    fitted(model)
    outputs = model.predict(IDS, verbose=0)
    assert np.abs(np.asarray(model(IDS)) - outputs).max() > 1e-4  # of the weights, which are not the averages
    np.testing.assert_allclose(model.merge().predict(IDS, verbose=0), outputs, atol=1e-5)
    model.save_adapters(tmp_path / "adapters.safetensors")
    other = adapted()
    other.load_adapters(tmp_path / "adapters.safetensors")
    np.testing.assert_allclose(other.predict(IDS, verbose=0), outputs, atol=1e-6)


@pytest.mark.slow
def test_adapters_start_from_the_averages_that_the_base_predicts_with():
    base = compiled(trainer.Model(Transformer(), seed=0), ema_decay=0.9)
    fitted(base)
    outputs = base.predict(IDS, verbose=0)
    assert np.abs(np.asarray(base(IDS)) - outputs).max() > 1e-4
    np.testing.assert_allclose(trainer.lora(base, RANK).predict(IDS, verbose=0), outputs, atol=1e-6)


@pytest.mark.slow
def test_generation_uses_the_adapters():
    base = trainer.Model(trainer.models.TransformerLM(TOKENS, num_layers=1, d_model=16, num_heads=2, max_len=8), seed=0)
    base.build(IDS[:1])
    model = trainer.lora(base, RANK)
    model.state = model.state.replace(params=jax.tree.map(lambda leaf: leaf + 0.3, model.state.params))
    tokens = trainer.models.generate(model, IDS[:4, :2], 3, temperature=0)
    for length in range(2, 5):
        expected = np.asarray(model.predict(tokens[:, :length], verbose=0))[:, -1].argmax(-1)
        np.testing.assert_array_equal(tokens[:, length], expected)
    assert (tokens != trainer.models.generate(base, IDS[:4, :2], 3, temperature=0)).any()


@pytest.mark.slow
def test_remat_and_16_bits_keep_the_adapters():
    for kind in MODULES:
        plain, remat = compiled(adapted(kind)), compiled(adapted(kind), remat=True)
        assert fitted(remat) == pytest.approx(fitted(plain), rel=1e-6)
    mixed = compiled(adapted(), precision="mixed_bfloat16")
    assert fitted(mixed) == pytest.approx(fitted(compiled(adapted())), rel=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed.state.params)} == {np.dtype(np.float32)}
    narrow = trainer.Sequential([nn.Dense(4, param_dtype=jnp.bfloat16)])
    narrow.build(np.ones((1, 3), np.float32))
    leaves = named_leaves(trainer.lora(narrow, 2).state.params)
    assert {path: leaf.dtype.name for path, leaf in leaves.items()} == {
        "layers_0/bias": "bfloat16", "layers_0/kernel": "bfloat16", "layers_0/lora_a": "float32",
        "layers_0/lora_b": "float32"}


def test_an_nnx_module_of_the_user_stays_as_it_is():
    module = NNXMLP()
    before = jax.tree.map(np.array, nnx.state(module, nnx.Param))
    model = trainer.lora(module, 1, "first")
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 6), np.float32), np.ones((4, 3), np.float32), verbose=0)
    assert not nnx.state(module, nnx.LoRAParam)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(module, nnx.Param))
    assert [weight.path for weight in model.trainable_weights] == ["first/lora_a", "first/lora_b"]


class OwnWeight(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x @ self.param("w", nn.initializers.ones, (3, 3)))


@pytest.mark.parametrize("make", [
    lambda **options: trainer.lora(LinenMLP(), **options), lambda **options: trainer.lora(NNXMLP(), **options)],
    ids=["linen", "nnx"])
@pytest.mark.parametrize(("options", "says"), [
    ({"targets": ["Dens_0", "firs"]}, r"`targets` has the pattern 'Dens_0', which matches none of the 2 paths"),
    ({"train": "heads"}, r"`train` has the pattern 'heads', which matches none of the \d paths"),
    ({"rank": 0}, "`rank` must be"), ({"alpha": -1.0}, "`alpha` must be"), ({"dropout": 1.0}, "`dropout` must be"),
    ({"targets": []}, "`targets` is empty")])
def test_arguments_that_fit_nothing_are_refused(make, options, says):
    with pytest.raises(ValueError, match=says):
        make(**options).build(np.ones((1, 6), np.float32))


def test_modules_and_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"selects 'w', a weight of shape \(3, 3\) of a layer that LoRA does not know"):
        trainer.lora(OwnWeight(), targets=["w"]).build(np.ones((1, 3), np.float32))
    with pytest.raises(TypeError, match="a dict of modules"):
        trainer.lora({"one": nn.Dense(1)})
    with pytest.raises(ValueError, match="has no linear layers"):
        trainer.lora(nn.LayerNorm()).build(np.ones((1, 3), np.float32))
    model = trainer.lora(nn.Dense(2), 2, alpha=4.0)
    with pytest.raises(TypeError, match="has adapters of LoRA already"):
        trainer.lora(model)
    model.build(np.ones((1, 3), np.float32))
    model.save_adapters(tmp_path / "a.safetensors")
    other = trainer.lora(nn.Dense(2), 2)
    other.build(np.ones((1, 3), np.float32))
    with pytest.raises(ValueError, match=r'"alpha": 4.0\}, and the model has lora=\{"rank": 2, "alpha": 2.0\}'):
        other.load_adapters(tmp_path / "a.safetensors")


@pytest.mark.slow
def test_a_file_of_other_targets_is_refused_without_advice_that_does_not_apply(tmp_path):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="last")(nn.Dense(2, name="first")(x))

    made = [trainer.lora(Two(), 2, targets) for targets in (["first"], None)]
    for model in made:
        model.build(np.ones((1, 3), np.float32))
    made[0].save_adapters(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="2 missing from the file: last/lora_a") as raised:
        made[1].load_adapters(tmp_path / "a.safetensors")
    assert "partial" not in str(raised.value)


@pytest.mark.parametrize("module", [lambda: nn.Dense(1), lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0))])
def test_a_deep_copy_of_an_unbuilt_model_has_adapters_of_its_own(module):
    model = trainer.lora(trainer.Model(module()), rank=2)
    copied = copy.deepcopy(model)
    for each in (copied, model):
        each.build(np.ones((2, 3), np.float32))
        assert [weight.path.rpartition("/")[2] for weight in each.trainable_weights] == ["lora_a", "lora_b"]
