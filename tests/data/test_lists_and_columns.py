"""Lists of batches, of images and of dict rows, and tables with named columns."""

import numpy as np
import pytest
from flax import linen as nn
from PIL import Image

import trainer
from trainer.data import DataError, Dataset, batches_from_columns
from trainer.data.adapt import adapt
from trainer.data.sources.arrays import as_batch

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8, dtype=np.int32)
BATCHES = [(X[:4], Y[:4]), (X[4:], Y[4:])]


class Table:
    """What `datasets.Dataset` shows: rows by number, columns by name as lists, and iteration over rows."""

    column_names = ("image", "label")

    def __init__(self):
        self.columns = {"image": [row.tolist() for row in X], "label": Y.tolist()}

    def __len__(self):
        return len(Y)

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: self.columns[name][key] for name in self.columns}

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


def model():
    made = trainer.Model(nn.Dense(1))
    made.compile("sgd", "mse", metrics=["mae"])
    return made


def loss_of(*data, **options):
    return model().fit(*data, epochs=2, verbose=0, **options).history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [BATCHES, [list(batch) for batch in BATCHES]], ids=["tuples", "lists"])
def test_a_list_of_batches_is_an_iterable_of_batches(batches):
    expected = model()
    history = expected.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y),
                           validation_batch_size=4).history
    listed = model()
    assert listed.fit(batches, epochs=2, verbose=0, validation_data=batches).history == history
    assert listed.evaluate(batches, verbose=0) == expected.evaluate(X, Y, batch_size=4, verbose=0)
    inputs = [(x,) for x, y in batches]
    np.testing.assert_array_equal(listed.predict(inputs, verbose=0), expected.predict(X, batch_size=4, verbose=0))


def test_a_list_of_arrays_is_several_inputs():
    assert [len(x) for x, y in adapt([X, X, X], Y, batch_size=8).read(0)] == [3]
    assert [len(x) for x, in adapt([X, X], batch_size=8).read(0)] == [2]
    assert [len(x) for x, y in adapt([(X, X), (X, X)], Y, batch_size=8).read(0)] == [2]
    assert [as_batch(batch).shape for batch in adapt([(1, 2, 3), (3, 4, 5)], batch_size=2).read(0)] == [(2, 3)]


@pytest.mark.parametrize("data", [(X, Y), [X, Y]], ids=["tuple", "list"])
def test_inputs_and_targets_as_one_argument_are_refused_with_the_call_to_write(data):
    with pytest.raises(ValueError, match=r"given as `x` is 2 inputs\. .*as in `fit\(x, y\)`"):
        model().fit(data, verbose=0)


@pytest.mark.parametrize("call", [
    lambda made, rows: made.fit(rows, np.ones(2), verbose=0),
    lambda made, rows: made.train_on_batch(np.stack(rows), rows),
    lambda made, rows: made.predict(rows, verbose=0),
    lambda made, rows: (made.build(np.ones((1, 4), np.float32)), made.predict(rows, verbose=0))],
    ids=["fit", "targets", "predict", "built"])
def test_observations_in_a_list_are_told_to_be_stacked(call):
    with pytest.raises(ValueError, match=r"A list .*inputs[.;] [iI]f .* row, pass `[y=x]*np\.stack\([xy]\)`"):
        call(model(), [np.ones(4, np.float32)] * 2)


class OneInput(nn.Module):
    @nn.compact
    def __call__(self, inputs, mask=None):
        assert mask is None
        return nn.Dense(1)(inputs[0]) + inputs[1]


@pytest.mark.slow
def test_a_list_is_one_input_of_a_module_with_one_positional_parameter_or_by_its_name():
    class Inputs(OneInput):
        def __call__(self, inputs):
            return super().__call__(inputs)

    for module, x in ((Inputs, [X, X[:, :1]]), (Inputs, (X, X[:, :1])), (OneInput, {"inputs": [X, X[:, :1]]})):
        made = trainer.Model(module())
        outputs, (bias, kernel) = made.predict(x, verbose=0), made.get_weights()
        np.testing.assert_allclose(outputs, X @ kernel + bias + X[:, :1], rtol=1e-5)


def test_a_list_of_images_is_an_array_of_their_pixels():
    pixels = np.random.default_rng(0).integers(0, 255, (4, 5, 6, 3), np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    (x, _), = adapt(images, Y[:4], batch_size=4).read(0)
    np.testing.assert_array_equal(x, pixels)
    x, = Dataset.from_columns([{"image": image} for image in images], "image").batch(4)
    np.testing.assert_array_equal(x, pixels)
    with pytest.raises(ValueError, match=r"one shape\. Received: 5 images.* of 2 shapes.*resize"):
        adapt([*images, images[0].resize((2, 2))], Y[:5])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("data", [
    Table, lambda: list(Table()), lambda: {"image": X, "label": Y},
], ids=["table", "list of rows", "dict of arrays"])
def test_columns_are_read_by_their_names(data):
    dataset = Dataset.from_columns(data(), x="image", y="label")
    assert loss_of(dataset.batch(4)) == loss_of(X, Y.astype(np.int32), batch_size=4, shuffle=False)
    (x, _, weight), = Dataset.from_columns(data(), {"a": "image", "b": "label"}, "label", "label").batch(8)
    np.testing.assert_array_equal(x["a"], X)
    np.testing.assert_array_equal(x["b"], weight)
    with pytest.raises(ValueError, match=r"no column 'lable'\. Did you mean 'label'"):
        Dataset.from_columns(data(), "image", "lable")


def test_a_column_that_a_later_row_lacks_names_the_row():
    with pytest.raises(ValueError, match=r"Row 1 of the data has no column 'b'\. Known names: a\."):
        Dataset.from_columns([{"a": 1.0, "b": 2.0}, {"a": 1.0}], "b")
    with pytest.raises(ValueError, match=r"The data have no column 3\. Known names: a\."):
        Dataset.from_columns({"a": [1.0]}, 3)


def by_name(x):
    return (x["size"] + x["age"])[:, None]


def test_inputs_that_a_module_reads_by_name_are_asked_for_by_name():
    columns = {"size": Y, "age": Y, "label": Y}
    trainer.Model(by_name).predict(Dataset.from_columns(columns, {"size": "size", "age": "age"}).batch(4), verbose=0)
    with pytest.raises(ValueError, match=r"`x` has no 'age'\. Known names: size\. It raised KeyError"):
        trainer.Model(by_name).predict(Dataset.from_columns(columns, {"size": "size"}).batch(4), verbose=0)
    with pytest.raises(ValueError, match=r"`x` has no 'age'\. Known names: size\. It raised KeyError"):
        trainer.Model(by_name).build({"size": X})
    for x in (Dataset.from_columns(columns, ["size", "age"]).batch(4), Dataset.from_columns(columns, "size").batch(4)):
        with pytest.raises(ValueError, match=r"reads `x` by names, .*from_columns\(data, x=\{\"size\": \"size\"\}\)"):
            trainer.Model(by_name).predict(x, verbose=0)


@pytest.mark.parametrize("data", [Table, lambda: list(Table())], ids=["table", "list of rows"])
def test_rows_with_named_columns_are_refused_with_the_way_to_read_them(data):
    with pytest.raises(ValueError, match=r"rows or batches with named columns.*from_columns\(data, x="):
        model().fit(data(), verbose=0)


@pytest.mark.parametrize(("batch", "message"), [
    ({"a": [1.0], "b": 2.0}, r"The column 'b' of a batch must have an item for each row\. .*: float\. .*\.batch\(32\)"),
    ({"a": [1.0], "b": np.array(2.0)}, r"The column 'b' of a batch must have an item for each row\. .*: array"),
    ({"a": [1.0], "b": "text"}, r"The column 'b' of a batch must have an item for each row\. Received: str"),
    ({"a": [1.0], "b": [[1], [1, 2]]}, r"The column 'b' of a batch cannot become an array with rows first\."),
    ({"a": [1.0], "b": [None, [1.0]]}, r"The column 'b' of a batch cannot become an array with rows first\."),
    ((np.ones(2), np.ones(2)), r"must be a dict of columns, of which 'a' is needed\. Received: \(array of shape"),
    ({"a": [1.0], "bb": [2.0]}, r"A batch has no column 'b'\. Did you mean 'bb'"),
])
def test_batches_without_such_a_column_of_rows_are_refused_with_its_name(batch, message):
    with pytest.raises(ValueError, match=message):
        next(iter(batches_from_columns([batch], "a", "b")))


def test_a_stream_of_columns_is_checked_before_it_is_read():
    for table in ({"a": np.ones(2)}, 5):
        with pytest.raises(TypeError, match=r"dicts of columns.*Received: a value of type (dict|int).*from_columns"):
            batches_from_columns(table, "a")
    for x in (None, []):
        with pytest.raises(ValueError, match=r"`x` must be the name of a column.*Received: x=(None|\[\])"):
            batches_from_columns([], x)


def test_a_structured_array_is_a_batch_of_columns():
    rows = np.array([(1.0, 2), (3.0, 4)], [("a", "f4"), ("b", "i4")])
    x, y = next(iter(batches_from_columns([rows], "a", "b")))
    assert (x.tolist(), y.tolist()) == ([1.0, 3.0], [2, 4])
    with pytest.raises(ValueError, match=r"of which 'c' is needed"):
        next(iter(batches_from_columns([rows], "c")))


def test_dicts_with_the_targets_are_refused_with_what_to_yield():
    with pytest.raises(ValueError, match=r"A dict is all inputs.*yield `\(batch\[\"image\"\], batch"):
        model().fit(({"image": x, "label": y} for x, y in BATCHES), verbose=0)


def test_a_list_of_rows_is_no_long_message():
    with pytest.raises(ValueError, match=r"\(41 arrays in all\).*np\.stack") as caught:
        adapt([np.zeros(3)] * 40, np.zeros(40))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(("columns", "others"), [
    ({"a": ["u", "v"]}, r"'a' \((object|str)\)"),
    ({"since": np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]")}, r"'since' \(datetime64\[ns\]\)"),
    ({"a": [True, False], "t": ["u", None]}, r"'a' \(bool\), 't' \((object|str)\)"),
    ({"a": {"dtype": "Int64"}}, r"'a' \(Int64\)"),
    ({f"c{number}": ["u", "v"] for number in range(12)}, r"'c0' .*'c7' \(\w+\), \.\.\. \(12 in all\)"),
])
def test_columns_of_a_data_frame_that_are_no_numbers_are_named(columns, others):
    pandas = pytest.importorskip("pandas")
    made = {name: pandas.array([1, None], **column) if isinstance(column, dict) else column
            for name, column in columns.items()}
    frame = pandas.DataFrame({"size": [1.0, 2.0], **made, "floors": [1, 2]})
    message = rf"`x` must be .* dtype object, of a table with columns of other dtypes: {others}\. Make numbers of text"
    with pytest.raises(DataError, match=message):
        adapt(frame, np.zeros(2))


def test_labels_of_text_in_a_series_are_named():
    pandas = pytest.importorskip("pandas")
    for labels in (pandas.Series(["yes", "no"]), pandas.Series(["yes", "no"], dtype="category")):
        with pytest.raises(DataError, match="`y`"):
            adapt(np.zeros((2, 3)), labels)
