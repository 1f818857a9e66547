"""Preprocessing layers: the data of `adapt`, missing values, files, modules, and refusals."""

import inspect
import json
from functools import partial

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.data import Dataset, PyDataset, RowDataset, preprocessing
from trainer.utils import register_keras_serializable

WORDS = np.array(["red", "green", "red", "blue", "red", "green", "blue", "red"])
NUMBERS = np.random.default_rng(0).normal(3, 2, (8, 2)).astype(np.float32)


# --- adapt -----------------------------------------------------------------------------------------------------------


class Batches(PyDataset):
    def __init__(self, array):
        super().__init__()
        self.array = array

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return self.array[2 * number:2 * number + 2], np.zeros(2)


SOURCES = {
    "array": lambda array: array, "list": lambda array: array.tolist(), "objects": lambda array: array.astype(object),
    "column": lambda array: pytest.importorskip("pandas").Series(array) if array.ndim == 1 else (
        pytest.importorskip("pandas").DataFrame(array)),
    "batches": lambda array: [array[:3], array[3:]], "generator": lambda array: iter(np.split(array, 4)),
    "dataset": lambda array: Dataset.from_arrays((array, np.arange(8))).shuffle(1).batch(3),
    "rows of a dataset": lambda array: Dataset.from_arrays(array), "row dataset": lambda array: RowDataset(array),
    "indexed": Batches, "pairs": lambda array: [(array[:5], np.zeros(5)), (array[5:], np.zeros(3))],
    "dataset's map": lambda array: Dataset.from_arrays({"a": array}).batch(4).map(lambda x: x["a"]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_data_give_the_same_state(source):
    if source != "objects":
        normalization = preprocessing.Normalization()
        normalization.adapt(SOURCES[source](NUMBERS))
        np.testing.assert_allclose(normalization.mean, NUMBERS.mean(0), rtol=1e-6)
        np.testing.assert_allclose(normalization.variance, NUMBERS.var(0), rtol=1e-6)
    lookup, texts = preprocessing.StringLookup(), preprocessing.TextVectorization()
    for layer in (lookup, texts):
        layer.adapt(SOURCES[source](WORDS))
    assert lookup.get_vocabulary() == ["[UNK]", "red", "green", "blue"] == texts.get_vocabulary()[1:]


def test_steps_are_the_batches_that_are_read():
    endless = Dataset.from_arrays(WORDS).repeat().batch(4)
    lookup = preprocessing.StringLookup()
    with pytest.raises(ValueError, match=r"endless.*`steps`"):
        lookup.adapt(endless)
    lookup.adapt(endless, steps=1)
    assert lookup.get_vocabulary(include_special_tokens=False) == ["red", "green", "blue"]
    lookup.adapt((batch for batch in [WORDS[:2], WORDS[3:4]]), steps=1)
    assert lookup.get_vocabulary(include_special_tokens=False) == ["red", "green"]


def test_a_second_adapt_replaces_the_state():
    lookup = preprocessing.IntegerLookup(output_mode="tf_idf")
    lookup.adapt([[5, 5], [7, 5]])
    first = lookup.get_config()
    lookup.adapt([[1, 2]])
    assert lookup.get_vocabulary() == [-1, 2, 1]
    lookup.adapt([[5, 5], [7, 5]])
    assert lookup.get_config() == first


def test_numbers_far_from_zero_have_the_right_variance():
    normalization = preprocessing.Normalization(axis=None)
    numbers = 1e6 + np.random.default_rng(0).normal(0, 1, 10_000)
    normalization.adapt(iter(np.split(numbers, 100)))
    assert normalization.variance == pytest.approx(numbers.var(), rel=1e-6)


LAYERS = {
    "normalization": lambda: preprocessing.Normalization(), "bins": lambda: preprocessing.Discretization(num_bins=3),
    "strings": lambda: preprocessing.StringLookup(), "integers": lambda: preprocessing.IntegerLookup(),
    "texts": lambda: preprocessing.TextVectorization(),
}


@pytest.mark.parametrize(("layer", "data", "message"), [
    ("normalization", [[1.0], [float("nan")]], "1 missing values.*among 2.*fillna"),
    ("normalization", [[1.0], [float("inf")]], "1 missing values"),
    ("normalization", [1.0, 2.0], r"x\[:, None\].*axis=None"),
    ("normalization", [["a"]], "takes numbers.*StringLookup"),
    ("normalization", [np.zeros((2, 3)), np.zeros((2, 4))], "same sizes"),
    ("normalization", np.zeros((0, 2)), "at least one row"),
    ("bins", [float("nan")], "1 missing values"), ("bins", np.array(["2020-01-01"], "M8[D]"), "dates by pandas"),
    ("strings", [1, 2], "takes text.*IntegerLookup"), ("strings", ["a", None], "1 missing values.*mask_token"),
    ("strings", np.array(["a", 3], object), "a value of type int"), ("strings", "text", "an iterable of batches"),
    ("strings", {"a": WORDS}, "an iterable of batches"), ("strings", 3, "an iterable of batches"),
    ("strings", [{"a": WORDS}], "takes one column"),
    ("strings", Dataset.from_arrays({"a": WORDS}).batch(2), "takes one column.*FeatureSpace"),
    ("strings", iter([]), "at least one batch"), ("texts", ["", None], "at least one word"),
    ("integers", [1.5], "whole numbers.*Discretization"), ("integers", ["1"], "whole numbers.*StringLookup"),
    ("integers", [1.0, float("nan")], r"1 missing values.*`fillna\(-1\)`.*mask_token=-1"),
    ("integers", [2**63], "whole numbers"),
])
def test_unusable_data_are_refused(layer, data, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LAYERS[layer]().adapt(data)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_call_before_adapt_is_refused(layer):
    with pytest.raises(ValueError, match=r"call (its )?`adapt"):
        LAYERS[layer]()([["1"]] if layer in ("strings", "texts") else [[1]])


def test_what_is_given_is_not_adapted():
    for layer in (preprocessing.Normalization(mean=1.0, variance=2.0), preprocessing.StringLookup(vocabulary=["a"]),
                  preprocessing.Discretization([1.0]), preprocessing.TextVectorization(vocabulary=["a"])):
        with pytest.raises(ValueError, match="cannot be adapted"):
            layer.adapt(WORDS)


@pytest.mark.parametrize("shape", [(0,), (0, 1)])
@pytest.mark.parametrize(("layer", "expected"), [  # as in Keras
    (preprocessing.TextVectorization(vocabulary=["a"]), (0, 0)),
    (preprocessing.TextVectorization(vocabulary=["a"], output_sequence_length=4), (0, 4)),
    (preprocessing.TextVectorization(vocabulary=["a"], output_mode="multi_hot"), (0, 2)),
    (preprocessing.StringLookup(vocabulary=["a"], output_mode="one_hot"), (0, 2)),
    (preprocessing.StringLookup(vocabulary=["a"]), None), (preprocessing.IntegerLookup(vocabulary=[1]), None),
    (preprocessing.Hashing(3), None),
], ids=repr)
def test_no_rows_give_no_rows_whatever_the_type_of_an_empty_array(layer, expected, shape):
    for data in (np.zeros(shape, object), np.zeros(shape), np.zeros(shape).tolist()):  # lists of no rows have one axis
        assert layer(data).shape == (expected or np.shape(data))


# --- missing values --------------------------------------------------------------------------------------------------


def test_missing_values_are_the_mask():
    pandas = pytest.importorskip("pandas")
    lookup = preprocessing.StringLookup(mask_token="")
    for column in (pandas.Series(["a", None, "b", "a"]), pandas.Series(["a", pandas.NA, "b", "a"], dtype="string")):
        lookup.adapt(column)
        assert lookup.get_vocabulary() == ["", "[UNK]", "a", "b"]
        assert lookup(column).tolist() == [2, 0, 3, 2]
    integers = preprocessing.IntegerLookup(mask_token=-1)
    for column in (pandas.Series([7, None, 8, 7]), pandas.Series([7, None, 8, 7], dtype="Int64")):
        integers.adapt(column)
        assert integers(column).tolist() == [2, 0, 3, 2]
    hashing = preprocessing.Hashing(5, mask_value="")
    assert hashing(pandas.Series(["a", None]))[1] == 0
    assert preprocessing.Hashing(5, mask_value=0)(pandas.Series([3, None]))[1] == 0
    with pytest.raises(ValueError, match="missing values"):
        preprocessing.Hashing(5)(["a", None])
    assert preprocessing.TextVectorization(vocabulary=["a"])(["a", None]).tolist() == [[2], [0]]


def test_texts_and_categories_of_bytes_are_read():
    assert preprocessing.StringLookup(vocabulary=["é"])(np.array(["é".encode()])).tolist() == [1]
    latin = preprocessing.TextVectorization(vocabulary=["é"], encoding="latin-1")
    assert latin(np.array(["é".encode("latin-1")])).tolist() == [[2]]


# --- vocabularies and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [[], ["[UNK]"]])
def test_a_vocabulary_is_read_from_a_file(tmp_path, special):
    path = tmp_path / "words.txt"
    path.write_text("\n".join([*special, "red", "blue", ""]), newline="\r\n")
    assert preprocessing.StringLookup(vocabulary=path)(["blue", "x", "red"]).tolist() == [2, 0, 1]
    (tmp_path / "numbers.txt").write_text("7\n-3")
    assert preprocessing.IntegerLookup(vocabulary=str(tmp_path / "numbers.txt"))([-3, 7]).tolist() == [2, 1]
    with pytest.raises(ValueError, match="one whole number a line"):
        preprocessing.IntegerLookup(vocabulary=path)
    with pytest.raises(ValueError, match="no vocabulary file"):
        preprocessing.StringLookup(vocabulary="absent.txt")


@register_keras_serializable("tests")
def without_marks(texts):
    return np.char.replace(np.char.lower(texts), "#", "")


def by_commas(texts):
    return [text.split(",") for text in texts.tolist()]


def test_functions_of_the_users_own_are_called_with_strings(tmp_path):
    layer = preprocessing.TextVectorization(standardize=without_marks, split=by_commas)
    layer.adapt(["#A b,c", "c"])
    assert layer.get_vocabulary() == ["", "[UNK]", "c", "a b"]
    layer.save(tmp_path / "layer.json")
    with pytest.raises(ValueError, match=r"`split` is a function of yours, 'by_commas'.*Register it"):
        preprocessing.load(tmp_path / "layer.json")
    again = preprocessing.load(tmp_path / "layer.json", custom_objects={"by_commas": by_commas})
    assert again(["c,d,A B"]).tolist() == layer(["c,d,A B"]).tolist() == [[2, 1, 3]]
    with pytest.raises(ValueError, match=r"`standardize` must return an array of the shape \(1,\)"):
        preprocessing.TextVectorization(standardize=lambda texts: texts[:0], vocabulary=["a"])(["a"])
    with pytest.raises(ValueError, match="a list of words for each text"):
        preprocessing.TextVectorization(split=lambda texts: [], vocabulary=["a"])(["a"])


@pytest.mark.parametrize("layer", [
    preprocessing.Rescaling(0.5, [1.0, 2.0]), preprocessing.CategoryEncoding(3, "count"),
    preprocessing.Discretization([0.1, 2.0], output_mode="one_hot"), preprocessing.Hashing(5, "", salt=(1, 2)),
    preprocessing.HashedCrossing(4), preprocessing.StringLookup(vocabulary=["a", "é"], mask_token=""),
    preprocessing.StringLookup(vocabulary=["a"], output_mode="tf_idf", idf_weights=[0.1], max_tokens=9,
                               pad_to_max_tokens=True),
    preprocessing.Normalization(axis=None, mean=1.0, variance=0.1, dtype="float16"),
    preprocessing.TextVectorization(ngrams=(1, 2), vocabulary=["a"], output_sequence_length=3),
], ids=repr)
def test_a_file_holds_the_layer(layer, tmp_path):
    layer.save(tmp_path / "layer.json")
    again = preprocessing.load(tmp_path / "layer.json")
    assert type(again) is type(layer) and again.get_config() == layer.get_config()


def test_files_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end with '.json'.*space\.json"):
        preprocessing.Rescaling(1.0).save(tmp_path / "space.keras")
    path = tmp_path / "other.json"
    for content, message in (({}, "no preprocessing layer"), ({"format_version": 2, "layer": {}}, "version 2"),
                             ({"format_version": 1, "layer": {"class_name": "StringLokup", "config": {}}},
                              "Did you mean 'StringLookup'"),
                             ({"format_version": 1, "layer": {"class_name": "Hashing", "config": {}}}, "malformed")):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            preprocessing.load(path)
    with pytest.raises(FileNotFoundError):
        preprocessing.load(tmp_path / "absent.json")
    path.write_text('{"format_version": 1, "lay')
    with pytest.raises(ValueError, match="malformed"):
        preprocessing.load(path)


@pytest.mark.slow
def test_an_intact_file_of_a_model_is_not_called_malformed(tmp_path):
    model = trainer.Model(nn.Dense(2))
    model.build(NUMBERS)
    model.export(tmp_path / "model.export")
    model.save_weights(tmp_path / "model.safetensors")
    np.savez(tmp_path / "model.npz", NUMBERS)
    for name in ("model.export", "model.safetensors", "model.npz"):
        with pytest.raises(ValueError, match=rf"{name}' is no preprocessing layer.*`trainer\.load_exported`"):
            preprocessing.load(tmp_path / name)


def test_a_configuration_of_keras_makes_the_layer():
    policy = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"}, "registered_name": None}
    config = {"name": "n", "trainable": True, "dtype": policy, "axis": [-1], "invert": False, "mean": None,
              "variance": None}
    assert preprocessing.Normalization.from_config(config).name == "n"
    config = {"name": "s", "trainable": True, "dtype": policy, "invert": False, "max_tokens": None, "vocabulary": ["a"],
              "num_oov_indices": 1, "oov_token": "[UNK]", "mask_token": None, "output_mode": "int", "sparse": False,
              "pad_to_max_tokens": False, "idf_weights": None, "vocabulary_size": 2, "encoding": "utf-8", "salt": None}
    assert preprocessing.StringLookup.from_config(config)(["a"]).tolist() == [1]


# --- modules ---------------------------------------------------------------------------------------------------------


def adapted():
    normalization = preprocessing.Normalization()
    normalization.adapt(NUMBERS)
    return normalization


def linen(normalization, lookup):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(jnp.concatenate([normalization(x["a"]), nn.Embed(4, 3)(lookup(x["b"]))], -1))

    return Net()


class Net(nnx.Module):
    def __init__(self, normalization, lookup, rngs):
        self.normalization, self.lookup = normalization, lookup
        self.embed, self.dense = nnx.Embed(4, 3, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.dense(jnp.concatenate([self.normalization(x["a"]), self.embed(self.lookup(x["b"]))], -1))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [linen, lambda *layers: Net(*layers, nnx.Rngs(0))], ids=["linen", "nnx"])
def test_layers_of_numbers_are_a_part_of_a_module_and_of_its_export(make, tmp_path):
    lookup = preprocessing.IntegerLookup()
    ids = np.array([3, 5, 3, 9, 3, 5, 9, 3], np.int32)
    lookup.adapt(ids)
    inputs, y = {"a": NUMBERS, "b": ids}, NUMBERS[:, :1]
    model = trainer.Model(make(adapted(), lookup))
    model.compile("sgd", "mse")
    model.fit(inputs, y, epochs=2, shuffle=False, verbose=0)
    outside = trainer.Model(make(lambda x: x, lambda x: x))
    outside.compile("sgd", "mse")
    outside.fit({"a": adapted()(NUMBERS), "b": lookup(ids).astype(np.int32)}, y, epochs=2, shuffle=False, verbose=0)
    predictions = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(
        predictions, outside.predict({"a": adapted()(NUMBERS), "b": lookup(ids)}, verbose=0), rtol=1e-5)
    model.export(tmp_path / "model.export")
    np.testing.assert_allclose(trainer.load_exported(tmp_path / "model.export")(inputs), predictions, rtol=1e-5)


@pytest.mark.parametrize("layer", [nn.Dense(1), nnx.Linear(2, 1, rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_a_layer_in_a_stack_cannot_change_once_it_is_compiled(layer):
    normalization = adapted()
    normalization.adapt(NUMBERS)
    model = trainer.Sequential([normalization, layer])
    model.build(NUMBERS)
    with pytest.raises(RuntimeError, match=r"cannot change any more.*new model"):
        normalization.adapt(NUMBERS)
    lookup = preprocessing.IntegerLookup(vocabulary=[1])
    jax.jit(lookup)(np.array([1]))
    with pytest.raises(RuntimeError, match="cannot change any more"):
        lookup.set_vocabulary([2])


@pytest.mark.slow
def test_arrays_of_devices_stay_there():
    for layer in (adapted(), preprocessing.Rescaling(2.0), preprocessing.Discretization([0.0])):
        found = layer(jnp.asarray(NUMBERS))
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(found, layer(NUMBERS), rtol=1e-6)


@pytest.mark.parametrize(("layer", "inputs", "error", "message"), [
    (lambda: preprocessing.Hashing(3), jnp.arange(3), TypeError, "runs on the host.*dataset.map"),
    (lambda: preprocessing.IntegerLookup(vocabulary=[1], num_oov_indices=0), jnp.arange(3), ValueError, "cannot do"),
    (lambda: preprocessing.IntegerLookup(vocabulary=[1], num_oov_indices=2, oov_method="farmhash"), jnp.arange(3),
     ValueError, "no 64-bit"),
    (lambda: preprocessing.IntegerLookup(vocabulary=[1]), jnp.ones(3), ValueError, "whole numbers"),
    (lambda: preprocessing.CategoryEncoding(3), jnp.ones(3), ValueError, "takes integers"),
])
def test_what_a_program_cannot_do_is_refused(layer, inputs, error, message):
    with pytest.raises(error, match=message):
        jax.jit(layer())(inputs)


# --- data sets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [
    preprocessing.StringLookup(vocabulary=["red", "blue"]), preprocessing.Hashing(7),
    preprocessing.StringLookup(vocabulary=["red", "blue"], output_mode="multi_hot"),
    preprocessing.TextVectorization(vocabulary=["red"], output_sequence_length=3)], ids=repr)
def test_a_data_set_maps_rows_or_batches(layer):
    dataset = Dataset.from_arrays((WORDS, np.arange(8))).shuffle(1)
    rows = next(iter(dataset.map(lambda x, y: (layer(x), y)).batch(8)))
    is_vector = getattr(layer, "output_mode", "") == "multi_hot"
    batch = next(iter(dataset.batch(8).map(lambda x, y: (layer(x[:, None] if is_vector else x), y))))
    assert rows[0].tolist() == batch[0].tolist() and rows[0].dtype == np.int32
    assert len(batch[0]) == 8


def test_a_row_is_normalized_as_in_a_batch():
    normalization = adapted()
    rows = next(iter(Dataset.from_arrays(NUMBERS).map(normalization).batch(8)))
    np.testing.assert_array_equal(rows, normalization(NUMBERS))


@pytest.mark.slow
def test_a_run_on_texts_continues_as_if_it_was_never_stopped(tmp_path):
    texts = np.array(["good film", "bad film", "fine", "poor plot here"] * 8, object)
    labels = (np.arange(32)[:, None] % 2).astype(np.float32)

    class Stop(trainer.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.optimizer.iterations == 6:
                raise KeyboardInterrupt

    def trained(folder, *callbacks):
        layer = preprocessing.TextVectorization(output_sequence_length=4)
        layer.adapt(texts)
        dataset = Dataset.from_arrays((texts, labels)).shuffle(3).batch(8).map(lambda x, y: (layer(x), y))
        model = trainer.Sequential([nn.Embed(layer.vocabulary_size(), 4), lambda x: x.mean(1), nn.Dense(1)])
        model.compile("adam", "mse")
        backup = trainer.callbacks.BackupAndRestore(tmp_path / folder, save_freq=1)
        model.fit(dataset, epochs=3, verbose=0, callbacks=[backup, *callbacks])
        return model.get_weights()

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", Stop())
    assert all(map(np.array_equal, whole, trained("stopped")))


# --- spaces of features ----------------------------------------------------------------------------------------------


def space(**options):
    return preprocessing.FeatureSpace({"city": "string_categorical", "size": "float_normalized"}, **options)


TABLE = {"city": np.array(["Rome", "Oslo", "Rome", "Rome"]), "size": np.array([1.0, 2.0, 3.0, 6.0])}


def test_a_table_is_adapted_to_in_any_form():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**TABLE, "label": [0, 1, 0, 1]})
    dataset = Dataset.from_columns(frame, x={"city": "city", "size": "size"}, y="label").batch(3)
    expected = space()
    expected.adapt(TABLE)
    for data in (frame, dataset, iter([frame[:1], frame[1:]])):
        found = space()
        found.adapt(data)
        np.testing.assert_allclose(found(TABLE), expected(frame[["size", "city"]]), rtol=1e-6)
    batch = next(iter(dataset.map(lambda x, y: (expected(x), y))))
    assert batch[0].shape == (3, 4) and batch[0].dtype == np.float32


def test_a_layer_of_ones_own_is_a_feature():
    texts = preprocessing.TextVectorization(output_mode="count")
    made = preprocessing.FeatureSpace({
        "text": preprocessing.FeatureSpace.feature("string", texts, "float"), "size": "float"}, output_mode="dict")
    made.adapt({"text": ["a b", "b"], "size": [1, 2]})
    assert {name: values.tolist() for name, values in made({"text": ["b b"], "size": [3]}).items()} == {
        "size": [[3.0]], "text": [[0, 2, 0]]}


def space_of_texts(layer, feature_mode):
    made = preprocessing.FeatureSpace({
        "size": "float", "text": preprocessing.FeatureSpace.feature("string", layer, feature_mode)})
    made.adapt({"text": ["x y", "x"], "size": [1, 2]})
    return made


@pytest.mark.parametrize("feature_mode", ["float", "int"])  # as in Keras
@pytest.mark.parametrize(("make", "mode", "expected"), [
    (preprocessing.TextVectorization, "multi_hot", [0, 1, 1]), (preprocessing.TextVectorization, "count", [0, 2, 1]),
    (preprocessing.StringLookup, "multi_hot", [1, 0, 0]), (preprocessing.StringLookup, "count", [1, 0, 0]),
    (partial(preprocessing.Hashing, 2), "multi_hot", [1, 0]), (partial(preprocessing.Hashing, 2), "count", [1, 0]),
])
def test_vectors_of_whole_numbers_are_a_part_of_one_array(make, mode, expected, feature_mode):
    received = space_of_texts(make(output_mode=mode), feature_mode)({"text": ["x y x"], "size": [3]})
    assert received.dtype == np.float32 and received.tolist() == [[3.0, *expected]]


@pytest.mark.parametrize(("layer_mode", "feature_mode", "message"), [
    ("int", "float", "has indices.*Give the TextVectorization output_mode='multi_hot'.*output_mode=\"dict\""),
    ("int", "one_hot", "Give the TextVectorization output_mode='multi_hot'.*the feature output_mode='float'"),
    ("multi_hot", "one_hot", "Give the feature output_mode='float'"),
])
def test_the_error_of_a_feature_of_texts_says_the_modes_that_work(layer_mode, feature_mode, message):
    made = space_of_texts(preprocessing.TextVectorization(output_mode=layer_mode), feature_mode)
    with pytest.raises(ValueError, match=message):
        made({"text": ["x"], "size": [1]})


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: space()(TABLE), ValueError, "Feature 'city': The layer has no vocabulary"),
    (lambda: space().adapt({"city": ["a"], "siz": [1.0]}), ValueError, "no column 'size'.*Did you mean 'siz'"),
    (lambda: space().adapt({"city": ["a", None], "size": [1.0, 2.0]}), ValueError, "Feature 'city':.*missing"),
    (lambda: space().adapt({"city": ["a", "b"], "size": [1.0]}), ValueError, "same number of rows"),
    (lambda: space().adapt([TABLE["size"]]), ValueError, "dicts of columns"),
    (lambda: space().adapt(3), TypeError, "an iterable of batches"),
    (lambda: space()([1.0]), TypeError, "a dict of columns, or a data frame"),
    (lambda: space()({**TABLE, "label": [0] * 4}), ValueError, "column 'label', which is no feature"),
    (lambda: preprocessing.FeatureSpace({"a": "float"})({"a": [np.nan, 1.0]}), ValueError,
     "Feature 'a': .* received 1 missing values .* among 2.*fillna"),
    (lambda: preprocessing.FeatureSpace({"a": "float"})({"a": [None, 1.0]}), ValueError,
     "Feature 'a': .* received 1 missing values .* among 2.*fillna"),
    (lambda: preprocessing.FeatureSpace({"a": "string_categorial"}), ValueError, "Did you mean 'string_categorical'"),
    (lambda: preprocessing.FeatureSpace({}), ValueError, "at least one feature"),
    (lambda: preprocessing.FeatureSpace({"a": 3}), TypeError, "the name of a kind"),
    (lambda: space(crosses=[("city", "sise")]), ValueError, "Unknown feature in `crosses` 'sise'. Did you mean 'size'"),
    (lambda: space(crosses=[("city",)]), ValueError, "at least two"),
    (lambda: preprocessing.FeatureSpace({"a": preprocessing.FeatureSpace.integer_hashed(3, "int")})({"a": [1]}),
     ValueError, "has indices.*output_mode='one_hot'"),
    (lambda: preprocessing.FeatureSpace({"a": preprocessing.FeatureSpace.feature(
        "float32", preprocessing.Rescaling(1.0), "one_hot")})({"a": [1]}), ValueError,
     "does not return one index of a known number.*Give the feature output_mode='float'"),
])
def test_unusable_tables_and_features_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- arguments -------------------------------------------------------------------------------------------------------


P = preprocessing


@pytest.mark.parametrize(("make", "message"), [
    (lambda: P.StringLookup(sparse=True, output_mode="count"), "`sparse=True` is not supported"),
    (lambda: P.CategoryEncoding(3, sparse=True), "`sparse=True` is not supported"),
    (lambda: P.Hashing(3, sparse=True), "`sparse=True` is not supported"),
    (lambda: P.TextVectorization(ragged=True), "`ragged=True` is not supported.*output_sequence_length"),
    (lambda: P.TextVectorization(output_mode="one_hot"), "one_hot.* not supported"),
    (lambda: P.TextVectorization(output_mode="count", output_sequence_length=3), "is for output_mode='int'"),
    (lambda: P.TextVectorization(standardize="lowercase"), "Did you mean 'lower'"),
    (lambda: P.TextVectorization(ngrams=()), "`ngrams`"),
    (lambda: P.TextVectorization(vocabulary=["a"])([["a", "b"]]), r"of shape \(rows,\) or \(rows, 1\)"),
    (lambda: P.TextVectorization(vocabulary=["a"], split=None)(["a"]), r"of shape \(rows, words\)"),
    (lambda: P.StringLookup(max_tokens=3, pad_to_max_tokens=True), "indices have no width"),
    (lambda: P.StringLookup(output_mode="count", pad_to_max_tokens=True), "`max_tokens`, which must be given"),
    (lambda: P.StringLookup(invert=True, output_mode="count"), "must be 'int'"),
    (lambda: P.StringLookup(vocabulary=["a", "a"]), "1 are repetitions"),
    (lambda: P.StringLookup(vocabulary=[]), "an empty one"),
    (lambda: P.StringLookup(vocabulary=["a", ""], mask_token=""), "has `mask_token` among"),
    (lambda: P.StringLookup(vocabulary=["a", "[UNK]"], invert=True), "has `oov_token` among"),
    (lambda: P.StringLookup(vocabulary=["a", "b"], max_tokens=2), "larger than `max_tokens`"),
    (lambda: P.StringLookup(vocabulary=["a"], output_mode="tf_idf"), "`idf_weights` must be given"),
    (lambda: P.StringLookup(vocabulary=["a"], output_mode="tf_idf", idf_weights=[1, 2]), "a number for each word"),
    (lambda: P.StringLookup(idf_weights=[1.0]), "belong to a `vocabulary`"),
    (lambda: P.StringLookup(vocabulary=["a"], num_oov_indices=0)(["b", "a"]), "1 of 2 words that are not"),
    (lambda: P.StringLookup(vocabulary=["a"], oov_token=None, invert=True)([9]), "needs an `oov_token`"),
    (lambda: P.IntegerLookup(salt=3), "oov_method='farmhash'"),
    (lambda: P.IntegerLookup(vocabulary_dtype="int32"), "must be 'int64'"),
    (lambda: P.Normalization(mean=1.0), "given together"),
    (lambda: P.Normalization(mean=[1.0], variance=1.0), "one shape"),
    (lambda: adapted()(np.zeros((2, 3))), "2 means along axis 1"),
    (lambda: P.Normalization(axis=3).adapt(NUMBERS), "the inputs have 2 axes"),
    (lambda: P.Discretization(), "Received: none"), (lambda: P.Discretization([1.0], 3), "Received: both"),
    (lambda: P.Discretization([2.0, 1.0]), "increasing order"),
    (lambda: P.CategoryEncoding(3)([3]), "from 0 to 2. Received.*from 3 to 3"),
    (lambda: P.CategoryEncoding(3)([1], count_weights=[1.0]), "is for output_mode='count'"),
    (lambda: P.CategoryEncoding(3, "count")([[1]], count_weights=[1.0]), "the shape of the indices"),
    (lambda: P.CategoryEncoding(3)(np.zeros((1, 1, 1), int)), r"shape \(rows, n\) or \(n,\)"),
    (lambda: P.Hashing(3, salt=(1, 2, 3)), "3 numbers"), (lambda: P.Hashing(3, dtype="float32"), "'int32' or 'int64'"),
    (lambda: P.HashedCrossing(3)([["a"]]), "at least two"),
    (lambda: P.HashedCrossing(3)([["a"], ["b", "c"]]), "arrays of one shape"),
])
def test_arguments_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


KERAS_CLASSES = [name for name in preprocessing.__all__ if name not in ("PreprocessingLayer", "load")]


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")  # needs no further package
        return pytest.importorskip("keras")


@pytest.mark.parametrize("name", KERAS_CLASSES)
def test_the_arguments_are_those_of_keras_in_its_order(name, keras):
    theirs, ours = (list(inspect.signature(cls).parameters) for cls in (
        getattr(keras.utils if name == "FeatureSpace" else keras.layers, name), getattr(preprocessing, name)))
    named = [argument for argument in theirs if argument != "kwargs"]
    assert [argument for argument in ours if argument in named] == named


def test_unsigned_integers_are_integers_up_to_those_of_int64():
    lookup = preprocessing.IntegerLookup(vocabulary=[1, 2])
    for dtype in (np.uint8, np.uint32, np.uint64):
        assert lookup(np.array([2, 1, 7], dtype)).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="takes whole numbers"):
        lookup(np.array([2**63], np.uint64))


def test_a_single_bin_has_masked_values_too():
    assert preprocessing.Hashing(1, mask_value="")(["a", "", "b"]).tolist() == [0, 0, 0]
