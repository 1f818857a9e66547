"""Files of torchvision and timm: a network in torch's layout gives its numbers here; what does not fit is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from safetensors.numpy import save_file

import trainer
from tests.support import keras_twins
from trainer import models
from trainer.models.vision.resnet import ResNet

SIDE = 45
STAGES = (1, 2)
rng = np.random.default_rng(0)


def normal(*shape):
    return (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)


def resnet_state(bottleneck, classes=3):
    """Returns the arrays of a ResNet by the names and in the layout of torchvision."""
    state = {}

    def conv(name, out, into, size):
        state[f"{name}.weight"] = normal(out, into, size, size)

    def norm(name, channels):
        for part, low, high in (("weight", 0.5, 1.5), ("bias", -0.2, 0.2), ("running_mean", -0.2, 0.2),
                                ("running_var", 0.5, 1.5)):
            state[f"{name}.{part}"] = rng.uniform(low, high, channels).astype(np.float32)
        state[f"{name}.num_batches_tracked"] = np.array(7)

    conv("conv1", 64, 3, 7)
    norm("bn1", 64)
    into = 64
    for stage, blocks in enumerate(STAGES, 1):
        width = 64 * 2 ** (stage - 1)
        out = 4 * width if bottleneck else width
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            layers = [(width, into, 1), (width, width, 3), (out, width, 1)] if bottleneck else [
                (width, into, 3), (width, width, 3)]
            for number, layer in enumerate(layers, 1):
                conv(f"{name}.conv{number}", *layer)
                norm(f"{name}.bn{number}", layer[0])
            if block == 0 and (stage > 1 or into != out):
                conv(f"{name}.downsample.0", out, into, 1)
                norm(f"{name}.downsample.1", out)
            into = out
    state["fc.weight"], state["fc.bias"] = normal(classes, into), normal(classes)
    return state


def resnet_outputs(state, images):
    """Returns what torchvision's ResNet computes; strides are in the convolution of size 3 of a block."""

    def conv(x, name, strides=1):
        kernel = state[f"{name}.weight"]
        padding = [(kernel.shape[-1] // 2,) * 2] * 2
        return jax.lax.conv_general_dilated(x, kernel, (strides, strides), padding,
                                            dimension_numbers=("NCHW", "OIHW", "NCHW"))

    def norm(x, name):
        weight, bias, mean, var = (state[f"{name}.{part}"][:, None, None]
                                   for part in ("weight", "bias", "running_mean", "running_var"))
        return (x - mean) / np.sqrt(var + 1e-5) * weight + bias

    x = nn.relu(norm(conv(images.transpose(0, 3, 1, 2), "conv1", 2), "bn1"))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), [(0, 0), (0, 0), (1, 1), (1, 1)])
    for stage, blocks in enumerate(STAGES, 1):
        for block in range(blocks):
            name, strides = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            if f"{name}.conv3.weight" in state:
                y = nn.relu(norm(conv(x, f"{name}.conv1"), f"{name}.bn1"))
                y = nn.relu(norm(conv(y, f"{name}.conv2", strides), f"{name}.bn2"))
                y = norm(conv(y, f"{name}.conv3"), f"{name}.bn3")
            else:
                y = nn.relu(norm(conv(x, f"{name}.conv1", strides), f"{name}.bn1"))
                y = norm(conv(y, f"{name}.conv2"), f"{name}.bn2")
            if f"{name}.downsample.0.weight" in state:
                x = norm(conv(x, f"{name}.downsample.0", strides), f"{name}.downsample.1")
            x = nn.relu(x + y)
    return nn.softmax(x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"])


def resnet(bottleneck, **options):
    return ResNet(**{"num_classes": 3, "blocks": STAGES, "bottleneck": bottleneck, "style": "torchvision",
                     "norm_epsilon": 1e-5, **options})


def built(module, side=SIDE):
    model = module if isinstance(module, trainer.Model) else trainer.Model(module)
    model.build(np.zeros((1, side, side, 3), np.float32))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("bottleneck", [False, True], ids=["basic", "bottleneck"])
def test_a_resnet_of_torchvision_gives_its_numbers(tmp_path, bottleneck):
    state = resnet_state(bottleneck)
    save_file(state, tmp_path / "model.safetensors")
    model = built(resnet(bottleneck))
    models.load_torch_weights(model, tmp_path / "model.safetensors")
    images = keras_twins.images(SIDE)
    np.testing.assert_allclose(model.predict(images, verbose=0), resnet_outputs(state, images), atol=1e-5)


def vit_state(width=8, classes=3, patches=4):
    state = {"cls_token": normal(1, 1, width), "pos_embed": normal(1, 1 + patches, width),
             "patch_embed.proj.weight": normal(width, 3, 8, 8), "head.weight": normal(classes, width),
             "head.bias": normal(classes), "patch_embed.proj.bias": normal(width)}
    for name in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        state |= {f"{name}.weight": normal(width), f"{name}.bias": normal(width)}
    for name, out, into in (("attn.qkv", 3 * width, width), ("attn.proj", width, width), ("mlp.fc1", 12, width),
                            ("mlp.fc2", width, 12)):
        state |= {f"blocks.0.{name}.weight": normal(out, into), f"blocks.0.{name}.bias": normal(out)}
    return state


def vit(**options):
    return models.ViTB16(**{"num_classes": 3, "patch_size": 8, "width": 8, "depth": 1, "num_heads": 2,
                            "mlp_width": 12, **options})


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_vit_of_timm_is_loaded_whole_and_also_as_a_part(tmp_path, wrapped):
    state = vit_state()
    save_file(state, tmp_path / "model.safetensors")
    part = vit(include_top=False, pooling="avg") if wrapped else vit()
    model = built(trainer.Sequential([part, nn.Dense(5)]) if wrapped else part, 16)
    models.load_torch_weights(model, tmp_path / "model.safetensors", skip_head=wrapped)
    params = model.state.params["layers_0"] if wrapped else model.state.params
    np.testing.assert_array_equal(params["pos_embed"], state["pos_embed"])
    np.testing.assert_array_equal(params["norm"]["scale"], state["norm.weight"])
    np.testing.assert_array_equal(params["blocks_0"]["attn"]["qkv"]["kernel"], state["blocks.0.attn.qkv.weight"].T)
    np.testing.assert_array_equal(params["patch_embed_proj"]["kernel"],
                                  state["patch_embed.proj.weight"].transpose(2, 3, 1, 0))
    if not wrapped:
        np.testing.assert_array_equal(params["head"]["kernel"], state["head.weight"].T)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("module", "state", "message"), [
    (resnet(True, style="keras"), resnet_state(True),
     r"12 arrays are not in the file: .*conv1_conv/bias.*`style=\"torchvision\"`"),
    (resnet(False, num_classes=4), resnet_state(False),
     r"2 arrays have other shapes: predictions/.*\(file: .*\), model: .*skip_head"),
    (resnet(False), {**resnet_state(False), "layer3.0.conv1.weight": normal(256, 128, 3, 3)},
     r"1 array of the file is not in the model: conv4_block1_1_conv/kernel"),
    (vit(), resnet_state(False), r"are not in the file.*of the file are not in the model"),
    (vit(depth=2), vit_state(), r"12 arrays are not in the file: blocks_1"),
], ids=["biases", "classes", "longer", "another", "deeper"])
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path, module, state, message):
    save_file(state, tmp_path / "model.safetensors")
    model = built(module, 16 if isinstance(module, models.ViTB16) else SIDE)
    before = model.get_weights()
    with pytest.raises(ValueError, match=message):
        models.load_torch_weights(model, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, model.get_weights(), before)


@pytest.mark.slow
def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(vit_state(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors' is no safetensors file, or is damaged"):
        models.load_torch_weights(built(vit(), 16), path)
    with pytest.raises(FileNotFoundError):
        models.load_torch_weights(built(vit(), 16), tmp_path / "nothing")


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match=r"`style` must be \"keras\" or \"torchvision\"\. Received: 'timm'"):
        jax.eval_shape(resnet(True, style="timm").init, jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 3)))
