"""Data sets: small files in the formats of the real ones, read as Keras reads them, and nothing in them executed."""

import functools
import gzip
import importlib
import json
import os
import pickle
import re

import numpy as np
import pytest
import sklearn.datasets

import trainer
from trainer.datasets import images, keras_files, tables

datasets = trainer.datasets

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")

RANDOM = np.random.default_rng(0)


def texts(count):
    return [RANDOM.integers(1, 400, RANDOM.integers(1, 12)).tolist() for _ in range(count)]


def objects(lists):
    made = np.empty(len(lists), object)
    made[:] = lists
    return made


def write_images(path):
    np.savez(path, x_train=RANDOM.integers(0, 256, (6, 28, 28), np.uint8), y_train=np.arange(6, dtype=np.uint8),
             x_test=RANDOM.integers(0, 256, (2, 28, 28), np.uint8), y_test=np.arange(2, dtype=np.uint8))


def write_table(path):
    np.savez(path, x=RANDOM.normal(size=(700, 5)), y=RANDOM.normal(size=700))


def write_reviews(path):
    np.savez(path, x_train=objects(texts(9)), y_train=np.arange(9) % 2, x_test=objects(texts(5)),
             y_test=np.arange(5) % 2)


def write_news(path):
    np.savez(path, x=objects(texts(23)), y=np.arange(23))


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
    with gzip.open(path, "wb") as file:
        file.write(header + array.tobytes())


def write_clothes(folder):
    for part, rows in (("train", 6), ("t10k", 3)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", RANDOM.integers(0, 256, (rows, 28, 28), np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.arange(rows, dtype=np.uint8))


def write_cifar(folder, names, labels, rows, protocol=2):
    folder.mkdir(parents=True)
    for name in names:
        batch = {b"data": RANDOM.integers(0, 256, (rows, 3072), np.uint8), b"batch_label": b"a batch"}
        batch |= {label.encode(): RANDOM.integers(0, 10, rows).tolist() for label in labels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))


def by_keras(name, monkeypatch, path, function="load_data", **arguments):
    """Returns what Keras's function gives for files at a path, in the place of its downloads."""
    module = importlib.import_module(f"keras.src.datasets.{name}")

    def get_file(fname=None, *args, **kwargs):
        return os.path.join(path, fname) if name == "fashion_mnist" else str(path)

    monkeypatch.setattr(module, "get_file", get_file)
    return getattr(module, function)(**arguments)


def assert_same(found, expected):
    for part, expected_part in zip(found, expected, strict=True):
        for array, expected_array in zip(part, expected_part, strict=True):
            np.testing.assert_array_equal(array, expected_array)
            assert np.asarray(array).dtype == np.asarray(expected_array).dtype


@pytest.mark.parametrize(("name", "write", "arguments"), [
    ("mnist", write_images, {}),
    ("boston_housing", write_table, {}),
    ("boston_housing", write_table, {"test_split": 0.35, "seed": 3}),
    ("california_housing", write_table, {"seed": 1}),
    ("california_housing", write_table, {"version": "small"}),
    ("imdb", write_reviews, {}),
    ("imdb", write_reviews, {"num_words": 100, "skip_top": 5, "maxlen": 9, "seed": 2}),
    ("imdb", write_reviews, {"start_char": None, "oov_char": None, "index_from": 0, "num_words": 300}),
    ("imdb", write_reviews, {"start_char": None, "index_from": 4}),
    ("reuters", write_news, {}),
    ("reuters", write_news, {"num_words": 100, "maxlen": 8, "test_split": 0.4, "seed": 1, "oov_char": None}),
])
def test_arrays_are_those_that_keras_reads(name, write, arguments, tmp_path, monkeypatch):
    write(tmp_path / "data.npz")
    expected = by_keras(name, monkeypatch, tmp_path / "data.npz", **arguments)
    assert_same(getattr(datasets, name).load_data(path=tmp_path / "data.npz", **arguments), expected)


def test_fashion_mnist_is_what_keras_reads(tmp_path, monkeypatch):
    write_clothes(tmp_path)
    expected = by_keras("fashion_mnist", monkeypatch, tmp_path)
    assert_same(datasets.fashion_mnist.load_data(tmp_path), expected)


def test_cifar_is_what_keras_reads(tmp_path, monkeypatch):
    inner = tmp_path / "cifar-100-python"
    write_cifar(inner, ["train", "test"], ["fine_labels", "coarse_labels"], 4, 3)
    for mode in ("fine", "coarse"):
        (x_train, y_train), (x_test, y_test) = by_keras("cifar100", monkeypatch, tmp_path, label_mode=mode)
        for path in (tmp_path, inner):
            found = datasets.cifar100.load_data(mode, path)
            # Keras leaves the labels as it finds them there, and makes them uint8 for CIFAR-10.
            assert_same(found, ((x_train, y_train.astype(np.uint8)), (x_test, y_test.astype(np.uint8))))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_cifar_10_is_put_together_from_its_batches(protocol, tmp_path):
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    write_cifar(tmp_path / "cifar-10-batches-py", names, ["labels"], 3, protocol)
    (x_train, y_train), (x_test, y_test) = datasets.cifar10.load_data(tmp_path)
    batches = [pickle.loads((tmp_path / "cifar-10-batches-py" / name).read_bytes()) for name in names]
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = np.concatenate([batch[b"labels"] for batch in batches])[:, None]
    np.testing.assert_array_equal(np.concatenate([x_train, x_test]), images)
    np.testing.assert_array_equal(np.concatenate([y_train, y_test]), labels)
    assert (x_train.shape, x_train.dtype, y_train.dtype, y_test.shape) == ((15, 32, 32, 3), np.uint8, np.uint8, (3, 1))


@pytest.mark.parametrize("name", ["imdb", "reuters"])
def test_word_indices_and_topics_are_kerass(name, tmp_path, monkeypatch):
    (tmp_path / "words.json").write_text(json.dumps({"the": 1, "film": 17}))
    module = getattr(datasets, name)
    assert module.get_word_index(tmp_path / "words.json") == {"the": 1, "film": 17} == by_keras(
        name, monkeypatch, tmp_path / "words.json", "get_word_index")
    if name == "reuters":
        assert module.get_label_names() == by_keras(name, monkeypatch, None, "get_label_names")


@pytest.mark.parametrize("name", ["mnist", "boston_housing", "california_housing", "imdb", "reuters"])
def test_files_are_looked_for_in_kerass_cache_with_kerass_hash(name, tmp_path, monkeypatch):
    asked = {}

    def of_ours(fname, origin, file_hash):
        asked["ours"] = (fname, origin, file_hash)
        raise InterruptedError

    def of_keras(fname=None, origin=None, file_hash=None):
        asked["keras"] = (fname, origin, file_hash)
        raise InterruptedError

    module = importlib.import_module(f"keras.src.datasets.{name}")
    monkeypatch.setattr(module, "get_file", of_keras)
    monkeypatch.setattr(keras_files, "get_file", of_ours)
    for load in (module.load_data, getattr(datasets, name).load_data,):
        with pytest.raises(InterruptedError):
            load()
    assert asked["ours"] == asked["keras"]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_archives_are_looked_for_in_kerass_cache_with_kerass_hash(name, monkeypatch):
    def ask(asked, fname, origin, **arguments):
        asked.append((fname, origin, sorted(arguments.items())))
        raise InterruptedError

    ours, theirs = [], []
    module = importlib.import_module(f"keras.src.datasets.{name}")
    monkeypatch.setattr(module, "get_file", functools.partial(ask, theirs))
    monkeypatch.setattr(images if name == "fashion_mnist" else keras_files, "get_file", functools.partial(ask, ours))
    for load in (module.load_data, getattr(datasets, name).load_data):
        with pytest.raises(InterruptedError):
            load()
    if name == "fashion_mnist":  # Keras begins with another of the four
        assert ours[0][2] == theirs[0][2] and ours[0][1].rpartition("/")[0] == theirs[0][1].rpartition("/")[0]
    else:
        assert ours == theirs


def test_a_file_in_the_cache_is_read_from_there(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "datasets").mkdir()
    write_images(tmp_path / "datasets" / "mnist.npz")
    digest = importlib.import_module("hashlib").sha256((tmp_path / "datasets" / "mnist.npz").read_bytes()).hexdigest()
    monkeypatch.setitem(keras_files._HASHES, "mnist.npz", digest)
    assert datasets.mnist.load_data()[0][0].shape == (6, 28, 28)


@pytest.mark.parametrize(("name", "loader", "part"), [
    ("digits", "load_digits", "images"), ("iris", "load_iris", "data"), ("wine", "load_wine", "data"),
    ("breast_cancer", "load_breast_cancer", "data"), ("diabetes", "load_diabetes", "data")])
def test_data_sets_of_scikit_learn_keep_all_rows_in_an_order_that_stays(name, loader, part):
    bundle = getattr(sklearn.datasets, loader)()
    load = getattr(datasets, name).load_data
    (x_train, y_train), (x_test, y_test) = load()
    rows = {(x.tobytes(), float(y)) for x, y in zip(bundle[part], bundle.target, strict=True)}
    assert {(x.tobytes(), float(y)) for x, y in zip([*x_train, *x_test], [*y_train, *y_test], strict=True)} == rows
    assert (len(x_train), len(x_test)) == (int(0.8 * len(bundle.target)), len(bundle.target) - len(x_train))
    assert_same(load(), ((x_train, y_train), (x_test, y_test)))
    assert not np.array_equal(load(seed=1)[0][0], x_train)
    assert len(load(test_split=0.5)[0][1]) == len(bundle.target) // 2


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    def without(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tables.importlib, "import_module", without)
    with pytest.raises(ImportError, match=r"pip install 'trainer-jax\[sklearn\]'"):
        datasets.iris.load_data()


# --- what files hold is not run --------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/evil",)


def test_a_data_set_that_would_run_code_is_refused_by_name(tmp_path):
    np.savez(tmp_path / "x.npz", x=objects([Evil(), Evil()]), y=np.arange(2))
    with pytest.raises(ValueError, match=r"x.npz' is malformed .*asks for posix.system.*Nothing of it was run"):
        datasets.reuters.load_data(tmp_path / "x.npz")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda folder: datasets.mnist.load_data(folder / "none.npz"), FileNotFoundError, "where there is no file"),
    (lambda folder: datasets.cifar10.load_data("/nope"), FileNotFoundError, "there is no 'data_batch_1'"),
    (lambda folder: datasets.cifar100.load_data(path=folder), FileNotFoundError, "there is no 'train'"),
    (lambda folder: datasets.fashion_mnist.load_data(folder), FileNotFoundError, "no 'train-images-idx3-ubyte.gz'"),
    (lambda folder: datasets.mnist.load_data(folder / "text.npz"), ValueError, "no zip archive"),
    (lambda folder: datasets.mnist.load_data(folder / "table.npz"), ValueError, "x_train"),
    (lambda folder: datasets.boston_housing.load_data(folder / "table.npz", test_split=1), ValueError, "`test_split`"),
    (lambda folder: datasets.california_housing.load_data("big"), ValueError, "`version` must be one of"),
    (lambda folder: datasets.cifar100.load_data("all"), ValueError, "`label_mode` must be one of"),
    (lambda folder: datasets.imdb.load_data(folder / "reviews.npz", maxlen=1), ValueError, "`maxlen` must leave"),
    (lambda folder: datasets.digits.load_data(seed=-1), ValueError, "`seed` must be"),
])
def test_bad_input_is_named(call, error, message, tmp_path):
    (tmp_path / "text.npz").write_text("text")
    write_table(tmp_path / "table.npz")
    write_reviews(tmp_path / "reviews.npz")
    with pytest.raises(error, match=re.escape(message)):
        call(tmp_path)


def test_an_idx_file_of_another_kind_is_refused(tmp_path):
    with gzip.open(tmp_path / "x.gz", "wb") as file:
        file.write(b"\x00\x00\x0d\x01" + bytes(8))
    with pytest.raises(ValueError, match=r"x.gz' is malformed .*MNIST"):
        keras_files.idx_array(str(tmp_path / "x.gz"))
