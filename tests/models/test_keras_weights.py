"""Files of Keras's weights: every format gives the same model, and what does not fit is named and changes nothing."""

import shutil
import zipfile

import h5py
import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support import keras_twins
from tests.support.keras_twin_cases import FAMILIES
from trainer import models
from trainer.models.vision.efficientnet import Normalization

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
SIZE = 32


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


@pytest.fixture(scope="module")
def theirs(keras):
    keras.utils.set_random_seed(1)
    return keras.applications.MobileNetV2(weights=None, input_shape=(SIZE, SIZE, 3), alpha=0.35, classes=7)


def built(module=None, shape=(1, SIZE, SIZE, 3)):
    module = module or models.MobileNetV2(num_classes=7, alpha=0.35)
    model = module if isinstance(module, trainer.Model) else trainer.Model(module, seed=5)
    model.build(np.zeros(shape, np.float32))
    return model


def published(theirs, path, renamed=lambda name: name):
    """Writes a file as `keras.applications` publishes them: the format of Keras 2, at the top level."""
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [renamed(layer.name).encode() for layer in theirs.layers]
        for layer in theirs.layers:
            group = file.create_group(renamed(layer.name))
            names = [f"{renamed(layer.name)}/{weight.name}:0" for weight in layer.weights]
            group.attrs["weight_names"] = [name.encode() for name in names]
            for name, weight in zip(names, layer.get_weights(), strict=True):
                group[name] = weight


FORMATS = {
    "weights.h5": lambda theirs, path: theirs.save_weights(path),
    "h5": lambda theirs, path: theirs.save(path),
    "keras": lambda theirs, path: theirs.save(path),
    "published.h5": published,
}


@pytest.fixture
def path(theirs, tmp_path):
    path = tmp_path / "theirs.weights.h5"
    theirs.save_weights(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_predictions_of_keras(theirs, tmp_path, suffix):
    path = tmp_path / f"theirs.{suffix}"
    FORMATS[suffix](theirs, path)
    model = built()
    models.load_keras_weights(model, path)
    assert keras_twins.difference(theirs, model, keras_twins.images(SIZE)) < 1e-5


@pytest.mark.slow
def test_published_files_with_names_of_older_versions_are_read(keras, tmp_path):
    theirs = keras.Sequential([
        keras.layers.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, name="block_conv"),
        keras.layers.Conv2D(5, 3, name="conv2d_3"), keras.layers.Conv2D(5, 3, name="conv2d_4"),
        keras.layers.BatchNormalization(name="batch_normalization_2")])
    older = {"block_conv": "block/conv", "conv2d_3": "convolution2d_9", "conv2d_4": "convolution2d_10",
             "batch_normalization_2": "batchnormalization_4"}

    class Ours(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 3), padding="VALID", name="block_conv")(x)
            x = nn.Conv(5, (3, 3), padding="VALID", name="conv2d")(x)
            x = nn.Conv(5, (3, 3), padding="VALID", name="conv2d_1")(x)
            return nn.BatchNorm(use_running_average=True, epsilon=1e-3, name="batch_normalization")(x)

    published(theirs, tmp_path / "theirs.h5", older.get)
    model = built(Ours(), (1, 8, 8, 3))
    models.load_keras_weights(model, tmp_path / "theirs.h5")
    images = keras_twins.images(8)
    np.testing.assert_allclose(model.predict(images, verbose=0), theirs(images), atol=1e-5)


@pytest.mark.slow
def test_what_a_compiled_model_keeps_beside_its_layers_is_left_out(keras, tmp_path):
    theirs = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, name="layers_0")])
    theirs.compile("adam", "mse", metrics=["mae"])
    theirs.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model = built(trainer.Sequential([nn.Dense(2)]), (1, 3))
    for suffix in ("weights.h5", "keras", "h5"):
        path = tmp_path / f"theirs.{suffix}"
        (theirs.save_weights if suffix == "weights.h5" else theirs.save)(path)
        model.set_weights([np.zeros_like(array) for array in model.get_weights()])
        models.load_keras_weights(model, path)
        np.testing.assert_array_equal(model.get_weights()[1], theirs.get_weights()[0])


@pytest.mark.slow
def test_a_file_without_names_of_layers_is_refused_with_the_fix(path):
    with h5py.File(path, "r+") as file:
        for group in file["layers"].values():
            del group["vars"].attrs["name"]
    with pytest.raises(ValueError, match=r"keeps no names of layers.*save it again"):
        models.load_keras_weights(built(), path)


@pytest.mark.slow
def test_an_architecture_in_a_larger_model_is_found_by_its_layers(keras, theirs, path):
    backbone = models.MobileNetV2(alpha=0.35, include_top=False, pooling="avg")
    model = built(trainer.Sequential([backbone, nn.Dense(2)]))
    head = {name: leaf for name, leaf in model.state.params.items() if "1" in name}
    models.load_keras_weights(model, path, skip_head=True)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), head, {
        name: leaf for name, leaf in model.state.params.items() if "1" in name}))
    features = keras.Model(theirs.input, theirs.layers[-2].output)
    loaded = next(part for name, part in model.state.params.items() if "0" in name)
    statistics = next(iter(model.state.model_state["batch_stats"].values()))
    received = backbone.apply({"params": loaded, "batch_stats": statistics}, keras_twins.images(SIZE))
    np.testing.assert_allclose(received, features.predict(keras_twins.images(SIZE), verbose=0), atol=1e-4)


@pytest.mark.slow
def test_another_classifier_is_refused_unless_it_is_skipped(path):
    model = built(models.MobileNetV2(num_classes=3, alpha=0.35))
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"1 layer has another shape: predictions \(file: \(1280, 7\), \(7,\), model: "
                                         r"\(1280, 3\), \(3,\)\)\. Pass `skip_head=True`"):
        models.load_keras_weights(model, path)
    assert all(map(np.array_equal, before, model.get_weights()))
    models.load_keras_weights(model, path, skip_head=True)
    changed = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert sum(changed) == 52, "each kernel: statistics and biases are those of new layers in both"
    with pytest.warns(UserWarning, match=r"1 of 105 layers have other shapes than in .* stay as they are: predictions"):
        models.load_keras_weights(model, path, skip_mismatch=True)


@pytest.mark.slow
def test_the_weights_of_another_model_are_refused_and_named(path):
    model = built(models.MobileNetV2(num_classes=7, alpha=0.5))
    with pytest.raises(ValueError, match=r"layers have other shapes: .*\(file: .* and \d+ more.*`alpha`"):
        models.load_keras_weights(model, path)
    model = trainer.Sequential([nn.Dense(2)])
    model.build(np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match=r"1 layer is not in the file: layers_0; 105 layers of the file are not"):
        models.load_keras_weights(model, path, skip_head=False)


@pytest.mark.slow
def test_a_file_that_lacks_a_layer_is_refused(path):
    with h5py.File(path, "r+") as file:
        name = next(name for name, group in file["layers"].items() if group["vars"].attrs["name"] == "block_3_project")
        del file["layers"][name]
    with pytest.raises(ValueError, match="1 layer is not in the file: block_3_project"):
        models.load_keras_weights(built(), path)


def transfer_model(keras, kind):
    """Returns a model whose base is the architecture without its classifier, followed by a layer of its own."""
    keras.utils.set_random_seed(2)
    base = keras.applications.MobileNetV2(weights=None, input_shape=(SIZE, SIZE, 3), alpha=0.35, include_top=False,
                                          pooling="avg")
    dense, inputs = keras.layers.Dense(5), keras.Input((SIZE, SIZE, 3))
    if kind == "sequential":
        return base, keras.Sequential([inputs, keras.layers.RandomFlip(), base, keras.layers.Dropout(0.2), dense])
    if kind == "functional":
        return base, keras.Model(inputs, dense(base(keras.layers.Conv2D(3, 1)(inputs))))
    return base, keras.Model(base.input, dense(base.output))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "suffix"), [
    pytest.param(kind, suffix, marks=[] if (kind, suffix) in (("sequential", "h5"), ("flat", "weights.h5")) else (
        pytest.mark.exhaustive))
    for kind in ("sequential", "functional", "flat") for suffix in ("weights.h5", "h5", "keras")])
def test_the_base_of_a_model_of_transfer_learning_is_loaded(keras, tmp_path, kind, suffix):
    base, theirs = transfer_model(keras, kind)
    (theirs.save_weights if suffix == "weights.h5" else theirs.save)(tmp_path / f"theirs.{suffix}")
    model = built(models.MobileNetV2(alpha=0.35, include_top=False, pooling="avg"))
    with pytest.raises(ValueError, match=r"of the file (is|are) not in the model: .*dense"):
        models.load_keras_weights(model, tmp_path / f"theirs.{suffix}")
    models.load_keras_weights(model, tmp_path / f"theirs.{suffix}", skip_head=True)
    assert keras_twins.difference(base, model, keras_twins.images(SIZE)) < 1e-5


@pytest.mark.slow
def test_counted_names_of_a_base_count_from_its_own_first_layer(keras, tmp_path):
    keras.backend.clear_session()
    base = keras.Sequential([keras.layers.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, name="conv2d_7"),
                             keras.layers.Conv2D(5, 3, name="conv2d_8")])
    inputs = keras.Input((8, 8, 3))
    theirs = keras.Model(inputs, base(keras.layers.Conv2D(3, 1, name="conv2d")(inputs)))
    theirs.save_weights(tmp_path / "theirs.weights.h5")

    class Ours(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 3), padding="VALID", name="conv2d")(x)
            return nn.Conv(5, (3, 3), padding="VALID", name="conv2d_1")(x)

    model = built(Ours(), (1, 8, 8, 3))
    models.load_keras_weights(model, tmp_path / "theirs.weights.h5", skip_head=True)
    assert keras_twins.difference(base, model, keras_twins.images(8)) < 1e-5


@pytest.mark.slow
def test_a_longer_network_is_not_taken_for_one_with_a_head(path):
    model = built(models.MobileNetV2(alpha=0.35, include_top=False))
    with h5py.File(path, "r+") as file:
        name = next(name for name, group in file["layers"].items() if group["vars"].attrs["name"] == "block_3_project")
        file.copy(file["layers"][name], file["layers"], "another")
        file["layers/another/vars"].attrs["name"] = "block_17_project"
    with pytest.raises(ValueError, match=r"1 layer of the file is not in the model: block_17_project\. Make the model"):
        models.load_keras_weights(model, path, skip_head=True)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("skip_head", [True, False])
def test_two_branches_of_one_architecture_are_not_told_apart_by_chance(keras, tmp_path, skip_head):
    def branch():
        inputs = keras.Input((8, 8, 3))
        return keras.Model(inputs, keras.layers.Conv2D(4, 3, name="block_conv")(inputs))

    inputs = keras.Input((8, 8, 3))
    keras.Model(inputs, branch()(inputs) + branch()(inputs)).save_weights(tmp_path / "theirs.weights.h5")

    class Ours(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(4, (3, 3), padding="VALID", name="block_conv")(x)

    model = built(Ours(), (1, 8, 8, 3))
    with pytest.raises(ValueError, match=r"has 2 parts that fit .*'/layers/functional', '/layers/functional_1'.*alone"):
        models.load_keras_weights(model, tmp_path / "theirs.weights.h5", skip_head=skip_head)


@pytest.mark.slow
def test_layers_of_one_name_are_refused(path):
    with h5py.File(path, "r+") as file:
        file.copy(file["layers/conv2d"], file["layers"], "another")
    with pytest.raises(ValueError, match="several layers of one name: Conv1"):
        models.load_keras_weights(built(), path)


@pytest.mark.slow
def test_advice_does_not_name_what_was_passed(path):
    model = built(models.MobileNetV2(num_classes=7, alpha=0.5))
    with pytest.raises(ValueError, match="num_classes") as raised:
        models.load_keras_weights(model, path, skip_head=True)
    assert "skip_head" not in str(raised.value) and "skip_mismatch=True" in str(raised.value)
    with h5py.File(path, "r+") as file:
        del file["layers/conv2d"]
    with pytest.raises(ValueError, match="1 layer is not in the file: Conv1") as raised:
        models.load_keras_weights(built(), path, skip_mismatch=True, skip_head=True)
    assert "skip" not in str(raised.value)


@pytest.mark.slow
def test_a_file_none_of_whose_layers_fits_is_refused_by_skip_mismatch_too(keras, tmp_path):
    keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="layers_0")]).save_weights(
        tmp_path / "theirs.weights.h5")
    model = built(trainer.Sequential([nn.Dense(2)]), (1, 3))
    with pytest.raises(ValueError, match=r"nothing for the model: 1 of its 1 layers have other shapes: layers_0"):
        models.load_keras_weights(model, tmp_path / "theirs.weights.h5", skip_mismatch=True)


@pytest.mark.slow
def test_the_flags_are_named_and_the_model_is_built(path):
    with pytest.raises(TypeError, match="positional"):
        models.load_keras_weights(built(), path, True)
    with pytest.raises(RuntimeError, match=r"not built.*`model\.build\(x\)`"):
        models.load_keras_weights(trainer.Model(models.MobileNetV2()), path)
    with pytest.raises(TypeError, match=r"Received: a value of type MobileNetV2.*trainer\.Model\(module\)"):
        models.load_keras_weights(models.MobileNetV2(), path)


@pytest.mark.slow
def test_files_for_another_function_name_it(path, tmp_path):
    model = built(trainer.Sequential([nn.Dense(2)]), (1, 3))
    model.save_weights(tmp_path / "ours.safetensors")
    with pytest.raises(ValueError, match=r"safetensors file.*`models\.load_torch_weights`.*`model\.load_weights`"):
        models.load_keras_weights(model, tmp_path / "ours.safetensors")
    with pytest.raises(ValueError, match=r"file of Keras.*`models\.load_keras_weights`"):
        models.load_torch_weights(model, path)
    with pytest.raises(ValueError, match=r"file of Keras.*models\.load_keras_weights\(model, path\)"):
        model.load_weights(path)
    (tmp_path / "torch.pth").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"pickle of `torch\.save`.*save_file"):
        models.load_torch_weights(model, tmp_path / "torch.pth")


def with_link(path):
    with h5py.File(path, "r+") as file:
        del file["layers/conv2d/vars/0"]
        file["layers/conv2d/vars/0"] = h5py.ExternalLink("/etc/hostname.h5", "/secret")


def with_external_array(path):
    with h5py.File(path, "r+") as file:
        del file["layers/conv2d/vars/0"]
        file["layers/conv2d/vars"].create_dataset("0", (3, 3, 3, 16), "f4", external=[("/etc/hostname", 0, 1728)])


def with_other_bytes(path):
    path.write_bytes(b"no weights at all" * 100)


def truncated(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def truncated_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", bytes(1000))
    truncated(path)


def empty(path):
    with h5py.File(path, "w"):
        pass


def bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("model.weights.h5", "w") as member:
        for _ in range(120):
            member.write(bytes(2**20))


def foreign_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", "x")


def damaged_archive(path):
    copy = path.with_suffix(".h5")
    shutil.move(path, copy)
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(copy, "model.weights.h5")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), [
    (with_link, "a link out of it"),
    (with_external_array, "lies in other files"),
    (with_other_bytes, "is no HDF5 file, or is truncated"),
    (truncated, "is no HDF5 file, or is truncated"),
    (truncated_archive, "is a truncated archive"),
    (empty, "has no layers with weights"),
    (bomb, "bytes of weights, and the model has room for"),
    (foreign_archive, "no `.keras` file of Keras 3"),
    (damaged_archive, "is damaged"),
])
def test_a_damaged_or_malicious_file_is_refused_and_changes_nothing(path, damage, message):
    model = built()
    before = model.get_weights()
    damage(path)
    with pytest.raises(ValueError, match=message):
        models.load_keras_weights(model, path)
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.slow
def test_a_missing_file_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        models.load_keras_weights(built(), tmp_path / "none.h5")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "module"), [
    ("MobileNetV2", "mobilenet_v2"), ("ResNet50", "resnet"), ("ResNet50V2", "resnet_v2"), ("VGG16", "vgg16"),
    ("DenseNet121", "densenet"), ("InceptionV3", "inception_v3"), ("EfficientNetB0", "efficientnet"),
    ("MobileNetV3Small", "mobilenet_v3"), ("ConvNeXtTiny", "convnext"), ("Xception", "xception"),
])
def test_images_are_prepared_as_in_keras(keras, name, module):
    images = np.random.default_rng(0).uniform(0, 255, (2, 5, 4, 3)).astype(np.float32)
    expected = getattr(keras.applications, module).preprocess_input(images.copy())
    np.testing.assert_allclose(models.preprocess_input(images, name), expected, atol=1e-4)


def test_images_that_cannot_be_prepared_are_refused():
    with pytest.raises(ValueError, match=r"three channels.*\(2, 5, 4, 1\)"):
        models.preprocess_input(np.zeros((2, 5, 4, 1)), "ResNet50")
    with pytest.raises(ValueError, match="Received: 'LeNet'"):
        models.preprocess_input(np.zeros((2, 5, 4, 3)), "LeNet")
    for name in ("MobileNetV9", "mobilenetv2", "MobileNetV2 "):
        with pytest.raises(ValueError, match=r"Near: .*'MobileNetV2'"):
            models.preprocess_input(np.zeros((2, 5, 4, 3)), name)


UNIT = np.linspace(0, 1, 12).reshape(1, 2, 2, 3)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["ResNet50", "MobileNetV2", "ResNet18", "ConvNeXtTiny"])
def test_images_from_0_to_1_give_a_warning(name):
    with pytest.warns(RuntimeWarning, match=r"from 0 to 255\. Received: values from 0 to 1\. .* `255 \* x`") as warned:
        models.preprocess_input(UNIT, name)
    assert warned[0].filename == __file__


@pytest.mark.parametrize("images", [0 * UNIT, 1.01 * UNIT, UNIT - 0.1, UNIT.round().astype(np.uint8), UNIT[:0]],
                         ids=["black", "brighter", "negative", "integers", "none"])
def test_other_images_give_no_warning(images):
    models.preprocess_input(images, "ResNet50")


def test_images_in_a_traced_function_give_no_warning():
    jax.jit(lambda x: models.preprocess_input(x, "ResNet50"))(UNIT.astype(np.float32))


def test_images_are_prepared_for_a_class_a_module_and_its_style():
    images = np.random.default_rng(0).uniform(0, 255, (2, 5, 4, 3)).astype(np.float32)

    class Mine(models.MobileNetV2):
        pass

    for model, name in ((models.VGG16, "VGG16"), (models.ResNet50(), "ResNet50"), (Mine, "MobileNetV2"),
                        (models.ResNet50(style="torchvision"), "ResNet18")):
        np.testing.assert_array_equal(models.preprocess_input(images, model), models.preprocess_input(images, name))
    assert models.preprocess_input(images.tolist(), "MobileNetV3Small").dtype == np.float32


def test_all_models_with_published_weights_have_a_way_to_prepare_images():
    others = {"CNN", "MLP", "VAE", "UNet", "DCGANGenerator", "DCGANDiscriminator", "TransformerEncoder",
              "TransformerLM"}
    for name in {name for name in models.__all__ if name[0].isupper() and not name.startswith("Llama")} - others:
        assert models.preprocess_input(np.zeros((1, 2, 2, 3)), name).shape == (1, 2, 2, 3)


def drawn(path, seed=0):
    """Replaces all arrays of a file by random ones; returns those of floats."""
    rng, arrays = np.random.default_rng(seed), []

    def draw(name, node):
        if isinstance(node, h5py.Dataset) and node.dtype.kind == "f":
            node[...] = rng.uniform(0.5, 1.5, node.shape)
            arrays.append(node[...])
        elif isinstance(node, h5py.Dataset):
            node[...] = 7  # the count of batches of `Normalization`, and states of dropout

    with h5py.File(path, "r+") as file:
        file.visititems(draw)
    return arrays


def in_bytes(arrays):
    return sorted(np.asarray(array, np.float32).tobytes() for array in arrays)  # kernels of one channel are transposed


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.Conv(4, (3, 3), padding="VALID", name="stem_conv")(Normalization(name="normalization")(x))
        x = nn.BatchNorm(not training, epsilon=1e-3, name="stem_bn")(x)
        return nn.Dense(3, name="predictions")(x.mean((1, 2)))


@pytest.mark.slow
def test_all_arrays_of_a_file_are_read_and_used(keras, tmp_path):
    layers = keras.layers
    theirs = keras.Sequential([
        layers.Input((6, 6, 3)), layers.Normalization(name="normalization"), layers.Conv2D(4, 3, name="stem_conv"),
        layers.BatchNormalization(name="stem_bn"), layers.GlobalAveragePooling2D(),
        layers.Dense(3, name="predictions")])
    path = tmp_path / "theirs.weights.h5"
    theirs.save_weights(path)
    arrays = drawn(path)
    theirs.load_weights(path)  # not `set_weights`, after which `Normalization` computes with what it had
    ours = built(Normalized(), (1, 6, 6, 3))
    models.load_keras_weights(ours, path)
    assert len(arrays) == 10 and in_bytes(ours.get_weights()) == in_bytes(arrays)
    x = np.random.default_rng(1).normal(size=(5, 6, 6, 3)).astype(np.float32)
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs(x), rtol=1e-5)


# Predictions of such weights say nothing: each image is the same but for rounding after a few layers.
# `test_keras_twins.py` compares predictions of weights that tell images apart.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("twin", FAMILIES, ids=lambda twin: twin.name)
def test_all_arrays_of_a_file_of_each_family_are_read(keras, twin, tmp_path):
    path = tmp_path / "theirs.weights.h5"
    twin.theirs(keras, twin.sizes[0]).save_weights(path)
    arrays = drawn(path)
    ours = built(twin.ours(), (1, *keras_twins.sides(twin.sizes[0]), 3))
    models.load_keras_weights(ours, path)
    assert in_bytes(ours.get_weights()) == in_bytes(arrays)
