"""ConvNeXt, InceptionV3, Xception, ViT and U-Net: sizes, features, training, and ViT against the equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trainer
from trainer import models
from trainer.models.layers.attention import MultiHeadAttention

# Values for 1000 classes, as `count_params` of Keras says, and as timm says for ViT.
COUNTS = {
    "ConvNeXtTiny": 28_589_128, "ConvNeXtSmall": 50_223_688, "ConvNeXtBase": 88_591_464, "ConvNeXtLarge": 197_767_336,
    "InceptionV3": 23_851_784, "Xception": 22_910_480,
    "ViTS16": 22_050_664, "ViTB16": 86_567_656, "ViTB32": 88_224_232, "ViTL16": 304_326_632,
}
TINY_CONVNEXT = {"depths": (1, 1, 2, 1), "widths": (8, 8, 16, 16)}
TINY_VIT = {"patch_size": 8, "width": 16, "depth": 2, "num_heads": 4, "mlp_width": 24}
TINY_UNET = {"features": (4, 8, 8)}
# (model, side of images)
TINY = [(models.ConvNeXtTiny(num_classes=4, drop_path_rate=0.5, dropout_rate=0.5, **TINY_CONVNEXT), 32),
        (models.ViTB16(num_classes=4, dropout_rate=0.5, **TINY_VIT), 16),
        (models.UNet(num_classes=4, dropout_rate=0.5, **TINY_UNET), 16)]
MULTIPLYING = ("conv_general_dilated", "dot_general")
BIG = [(models.InceptionV3(num_classes=4), 75), (models.Xception(num_classes=4), 71)]


def names(cases):
    return [type(model).__name__ for model, *_ in cases]


def images(side, *, rows=2, channels=3, dtype=np.float32, scale=1.0):
    return (scale * np.random.default_rng(0).uniform(-1, 1, (rows, side, side, channels))).astype(dtype)


def size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def shapes(model, *shape):
    """Returns the shapes of outputs and variables of a model, for which nothing is computed."""
    return jax.eval_shape(model.init_with_output, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))


def perturbed(tree, seed=0):
    """Returns a tree with random numbers added, so that no initial zero or one hides an error."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), tree)


@pytest.fixture(scope="module")
def keras_convnext():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras.src.applications.convnext")  # whose sizes are free, unlike the public ones


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", COUNTS)
def test_each_size_has_the_published_number_of_values(name):
    outputs, variables = shapes(getattr(models, name)(), 1, 224, 224, 3)
    assert outputs.shape == (1, 1000)
    assert size(variables) == COUNTS[name]


@pytest.mark.slow
def test_unet_has_the_values_that_its_layers_imply():
    def pair(before, after):
        return 9 * before * after + 9 * after * after + 4 * after  # and scale and bias of two normalizations

    widths = (64, 128, 256, 512, 1024)
    down = sum(pair(before, after) for before, after in zip((3, *widths), widths, strict=False))
    up = sum(pair(2 * width, width) + (4 * 2 * width * width + width) for width in widths[:-1])
    _, variables = shapes(models.UNet(num_classes=2), 1, 32, 32, 3)
    assert size(variables["params"]) == down + up + (64 * 2 + 2) == 31_037_698


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("model", "side", "channels", "cells"), [
    (models.ConvNeXtTiny(), 97, 768, 3), (models.InceptionV3(), 139, 2048, 3), (models.Xception(), 96, 2048, 3)])
def test_without_a_top_features_come_out_pooled_if_asked(model, side, channels, cells):
    headless = model.clone(include_top=False)
    assert shapes(headless, 2, side, side, 3)[0].shape == (2, cells, cells, channels)
    assert shapes(headless.clone(pooling="max"), 2, side, side, 3)[0].shape == (2, channels)


@pytest.mark.slow
def test_without_a_top_vit_gives_tokens_or_pools_those_of_patches():
    model, x = models.ViTB16(include_top=False, **TINY_VIT), images(16)
    variables = model.init(jax.random.key(0), x)
    tokens = model.apply(variables, x)
    assert tokens.shape == (2, 5, 16)
    for pooling, expected in (("avg", tokens[:, 1:].mean(1)), ("max", tokens[:, 1:].max(1))):
        np.testing.assert_allclose(model.clone(pooling=pooling).apply(variables, x), expected, rtol=1e-6)


@pytest.mark.slow
def test_without_a_top_convnext_normalizes_after_pooling():
    model, x = models.ConvNeXtTiny(include_top=False, pooling="avg", **TINY_CONVNEXT), images(64)
    pooled = model.apply(model.init(jax.random.key(0), x), x)
    np.testing.assert_allclose(pooled.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(pooled.std(-1), 1, atol=1e-2)


def layer_norm(x, params):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * params["scale"] + params["bias"]


def dense(x, params):
    return x @ params["kernel"] + params["bias"]


def vit_by_the_equations(x, params, patch, heads):
    """Returns the logits of ViT for one image: equations 1 to 4 of the paper, a patch and a head at a time."""
    side, channels = x.shape[0], x.shape[-1]
    kernel = params["patch_embed_proj"]["kernel"].reshape(patch * patch * channels, -1)
    patches = [x[row:row + patch, column:column + patch].reshape(-1)
               for row in range(0, side, patch) for column in range(0, side, patch)]
    z = np.concatenate([params["cls_token"][0], patches @ kernel + params["patch_embed_proj"]["bias"]])
    z = z + params["pos_embed"][0]
    depth = z.shape[1] // heads
    for name in sorted(name for name in params if name.startswith("blocks")):
        block = params[name]
        query, key, value = np.split(dense(layer_norm(z, block["norm1"]), block["attn"]["qkv"]), 3, -1)
        outputs = []
        for head in range(heads):
            part = slice(head * depth, (head + 1) * depth)
            scores = np.exp(query[:, part] @ key[:, part].T / np.sqrt(depth))
            outputs.append(scores / scores.sum(-1, keepdims=True) @ value[:, part])
        z = z + dense(np.concatenate(outputs, -1), block["attn"]["proj"])
        hidden = dense(layer_norm(z, block["norm2"]), block["mlp_fc1"])
        hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        z = z + dense(hidden, block["mlp_fc2"])
    return dense(layer_norm(z, params["norm"])[0], params["head"])


@pytest.mark.slow
def test_vit_is_what_the_paper_says():
    model, x = models.ViTB16(num_classes=5, classifier_activation=None, **TINY_VIT), images(24)
    params = perturbed(model.init(jax.random.key(0), x)["params"])
    logits = model.apply({"params": params}, x)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = [vit_by_the_equations(image, wide, 8, 4) for image in x.astype(np.float64)]
    assert np.std(expected, 0).mean() > 0.02
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.slow
def test_causal_attention_does_not_see_what_comes_later():
    attention = MultiHeadAttention(num_heads=2, causal=True)
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    variables = attention.init(jax.random.key(0), x)
    later = x.copy()
    later[:, 4:] += 1
    before, after = attention.apply(variables, x), attention.apply(variables, later)
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert not np.allclose(before[:, 4:], after[:, 4:])


def test_attention_refuses_channels_that_heads_do_not_divide():
    with pytest.raises(ValueError, match=r"multiple of `num_heads`.*8 channels and num_heads=3"):
        MultiHeadAttention(num_heads=3).init(jax.random.key(0), jnp.zeros((1, 2, 8)))


@pytest.mark.parametrize(("model", "shape", "message"), [
    (models.ViTB16(), (1, 224, 200, 3), r"ViTB16.*multiples of 16.*\(1, 224, 200, 3\)"),
    (models.UNet(), (1, 64, 72, 3), r"multiples of 16.*\(1, 64, 72, 3\).*to 64x80.*fewer `features`"),
    (models.UNet(), (64, 64, 3), r"channel axis"),
    (models.InceptionV3(), (1, 74, 80, 3), r"at least 75x75"),
    (models.Xception(), (1, 71, 70, 3), r"at least 71x71"),
    (models.ConvNeXtTiny(), (1, 31, 31, 3), r"at least 32x32.*Resize them"),
    (models.ResNet18(), (1, 3, 32, 32), r"Channels stand last: `np\.moveaxis\(x, 1, -1\)`"),
], ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None)
def test_images_of_a_size_that_does_not_fit_are_refused(model, shape, message):
    with pytest.raises(ValueError, match=message):
        shapes(model, *shape)


def test_vit_refuses_images_of_another_size_than_it_was_made_with():
    model = models.ViTB16(**TINY_VIT)
    variables = jax.eval_shape(model.init, jax.random.key(0), images(16))
    with pytest.raises(ValueError, match=r"ViTB16 are of images with 4 patches.*with 9\. Resize"):
        jax.eval_shape(model.apply, variables, images(24))


@pytest.mark.slow
def test_unet_gives_probabilities_of_each_pixel():
    model, x = models.UNet(num_classes=3, **TINY_UNET), images(16)[:, :, :12]
    outputs, _ = model.init_with_output(jax.random.key(0), x)
    assert outputs.shape == (2, 16, 12, 3)
    assert outputs.dtype == jnp.float32
    np.testing.assert_allclose(outputs.sum(-1), 1, rtol=1e-6)


@pytest.mark.slow
def test_unet_sees_surroundings_by_the_low_resolutions_and_details_beside_them():
    model, x = models.UNet(num_classes=3, classifier_activation=None, **TINY_UNET), images(16, rows=1)
    variables = model.init(jax.random.key(0), x)

    def seen(variables):
        return jax.grad(lambda x: model.apply(variables, x)[0, 8, 8, 0])(x).any((0, -1)).sum()

    assert seen(variables) > 150
    blocked = jax.tree.map(jnp.zeros_like, variables["params"]["up0_transpose"])
    # Four convolutions of 3x3 at the full resolution.
    assert 40 < seen(variables | {"params": variables["params"] | {"up0_transpose": blocked}}) <= 81


@pytest.mark.slow
def test_convnext_normalizes_pixels_of_three_channels_only():
    model = models.ConvNeXtTiny(num_classes=4, **TINY_CONVNEXT)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    variables = perturbed(model.init(jax.random.key(0), pixels))
    normalized = ((pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).astype(np.float32)
    expected = model.clone(include_preprocessing=False).apply(variables, normalized)
    np.testing.assert_allclose(model.apply(variables, pixels), expected, atol=1e-5)
    grey = images(32, channels=1)
    variables = model.init(jax.random.key(0), grey)
    np.testing.assert_array_equal(model.apply(variables, grey),
                                  model.clone(include_preprocessing=False).apply(variables, grey))


@pytest.mark.slow
def test_stochastic_depth_drops_a_block_for_whole_images():
    model = models.ConvNeXtTiny(include_top=False, drop_path_rate=0.5, layer_scale_init_value=None, depths=(1, 1),
                                widths=(8, 8))
    x = np.broadcast_to(images(32, rows=1), (16, 32, 32, 3))
    variables = model.init(jax.random.key(0), x)
    outputs = model.apply(variables, x, training=True, rngs={"dropout": jax.random.key(1)})
    assert len(np.unique(outputs.reshape(16, -1).round(3), axis=0)) == 2
    alike = model.apply(variables, x)
    np.testing.assert_allclose(alike, np.broadcast_to(alike[:1], alike.shape), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "side"), TINY, ids=names(TINY))
def test_dropout_acts_in_training_only(model, side):
    x = images(side)
    variables = model.init(jax.random.key(0), x)

    def trained(seed):
        return model.apply(variables, x, training=True, rngs={"dropout": jax.random.key(seed)},
                           mutable=["batch_stats"])[0]

    assert not np.allclose(trained(1), trained(2))
    plain = model.clone(dropout_rate=0.0, **({"drop_path_rate": 0.0} if hasattr(model, "drop_path_rate") else {}))
    np.testing.assert_array_equal(model.apply(variables, x), plain.apply(variables, x))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "side"), TINY, ids=names(TINY))
def test_a_training_step_in_bfloat16_is_finite(model, side):
    trained = trainer.Model(model.clone(dtype=jnp.bfloat16))
    trained.compile(optax.sgd(0.1), "sparse_categorical_crossentropy")
    labels = np.zeros((2, *((side, side) if isinstance(model, models.UNet) else ())), np.int32)
    x = images(side)
    trained.build(x[:1])
    before = trained.get_weights()
    loss = trained.train_on_batch(x, labels)
    after = trained.get_weights()
    assert np.isfinite(np.asarray(loss)).all()
    assert all(np.isfinite(array).all() and array.dtype == np.float32 for array in after)
    assert sum(not np.array_equal(old, new) for old, new in zip(before, after, strict=True)) > len(after) // 2
    assert trained.predict(x, verbose=0).dtype == np.float32


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("model", "side"), [*TINY, *BIG], ids=names([*TINY, *BIG]))
def test_every_layer_computes_in_the_given_dtypes(model, side):
    narrow = model.clone(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **(
        {} if isinstance(model, models.UNet) else {"include_top": False}))
    outputs, variables = shapes(narrow, 1, side, side, 3)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(variables["params"]))
    assert outputs.dtype == (jnp.float32 if isinstance(model, models.UNet) else jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda variables: narrow.apply(variables, jnp.zeros((1, side, side, 3))))(variables)
    multiplying = [equation for equation in jaxpr.eqns if equation.primitive.name in MULTIPLYING]
    assert len(multiplying) >= 6
    assert {operand.aval.dtype.name for equation in multiplying for operand in equation.invars} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
@pytest.mark.parametrize(("suffix", "options"), [
    (".h5", {"num_classes": 4}), (".keras", {"num_classes": 4}),
    (".weights.h5", {"include_top": False, "pooling": "avg"}), (".weights.h5", {"include_top": False}),
], ids=["h5", "keras", "pooled", "headless"])
def test_convnext_loads_what_keras_saves_of_nested_models(keras_convnext, suffix, options, tmp_path):
    plan = {"depths": TINY_CONVNEXT["depths"], "projection_dims": TINY_CONVNEXT["widths"]}
    theirs = keras_convnext.ConvNeXt(**plan, name="convnext_tiny", input_shape=(64, 64, 3), **{
        {"num_classes": "classes"}.get(name, name): value for name, value in options.items()})
    theirs.set_weights(perturbed(theirs.get_weights()))
    path = tmp_path / f"saved{suffix}"
    (theirs.save_weights if suffix == ".weights.h5" else theirs.save)(path)
    ours, x = trainer.Model(models.ConvNeXtTiny(**TINY_CONVNEXT, **options)), images(64, scale=100)
    ours.build(x[:1])
    models.load_keras_weights(ours, path)
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), atol=2e-5)
