"""Calls of `tf.data` and of torch's `DataLoader` get errors that say what to write here."""

import re

import numpy as np
import pytest

from tests.support.pages import rows_of_tables
from trainer import data
from trainer.data.sources import foreign_names

X, Y = np.ones((8, 2), np.float32), np.ones(8, np.int32)
ROWS = data.Dataset.from_arrays((X, Y))
MADE = data.RowDataset(list(zip(X, Y, strict=True)))
BUCKETED = data.bucketed(([[1, 2], [3]], [0, 1]), [2, 4], 1)
HERE = {name for name in foreign_names.METHODS if hasattr(data.Dataset, name)}
GUIDE = {old[9:-1]: remark for old, new, remark in rows_of_tables("docs/migration/from_tf_keras.md")
         if new == "none" and old.startswith("`Dataset.")}


@pytest.mark.parametrize("name", sorted(foreign_names.METHODS.keys() - HERE))
@pytest.mark.parametrize("owner", [ROWS, data.Dataset, MADE, BUCKETED],
                         ids=["dataset", "its class", "rows", "bucketed"])
def test_a_name_of_another_datasets_says_what_to_use(owner, name):
    with pytest.raises(AttributeError) as raised:
        getattr(owner, name)
    assert str(raised.value).endswith(f" has no attribute {name!r}. {foreign_names.METHODS[name]}")
    assert raised.value.name == name and raised.value.obj is owner
    assert not hasattr(owner, name) and name not in dir(owner)


def test_names_that_a_dataset_has_are_foreign_to_others_alone():
    assert {"take", "repeat"} == HERE
    for owner in (MADE, BUCKETED):
        with pytest.raises(AttributeError, match=r"has no attribute 'take'\. Instead: `fit\(steps_per_epoch=n\)`"):
            owner.take(2)


@pytest.mark.parametrize("owner", [ROWS, data.Dataset, MADE, BUCKETED], ids=repr)
def test_for_other_names_there_is_the_list_of_all(owner):
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'\. All names: https://"):
        _ = owner.nothing


@pytest.mark.parametrize("name", foreign_names.NAMES)
def test_a_name_that_the_package_lacks_says_what_to_use(name):
    with pytest.raises(AttributeError) as raised:
        getattr(data, name)
    assert str(raised.value) == f"module 'trainer.data' has no attribute {name!r}. {foreign_names.NAMES[name]}"


def test_the_names_of_the_sentences_are_here():
    for sentence in [*foreign_names.METHODS.values(), *foreign_names.NAMES.values()]:
        for path in re.findall(r"`((?:trainer\.\w+|Dataset)\.\w+)", sentence):
            owner, _, name = path.rpartition(".")
            owner = data.Dataset if owner == "Dataset" else __import__(owner, fromlist=[name])
            assert hasattr(owner, name), sentence


def test_the_guide_says_the_same():
    said = {name: foreign_names.METHODS[name].rstrip(".") for name in GUIDE}
    assert said and said == {name: remark[0].upper() + remark[1:] for name, remark in GUIDE.items()}


@pytest.mark.parametrize(("call", "message"), [
    (lambda: data.Dataset.from_arrays(X, Y), r"`Dataset.from_arrays` takes .*one tuple.*\(\(x, y\)\)"),
    (lambda: data.Dataset.from_arrays(x=X, y=Y), r"has no argument 'x'\. Give the arrays as one tuple"),
    (lambda: ROWS.shuffle(buffer_size=100), r"`Dataset.shuffle` has no argument 'buffer_size'\. Leave it out"),
    (lambda: ROWS.shuffle(100, seed=0), "`Dataset.shuffle` got multiple values.* There is no buffer"),
    (lambda: ROWS.shuffle(100, 0), "`Dataset.shuffle` takes .* were given. There is no buffer"),
    (lambda: ROWS.shuffle(seeds=0), "'seeds'. Did you mean 'seed'"),
    (lambda: ROWS.map(print, num_parallel_calls=4), r"`Dataset.map` has no argument 'num_parallel_calls'\. Leave it"),
    (lambda: ROWS.map(print, 4), "takes .* were given. Leave it out"),
    (lambda: ROWS.map(), "`Dataset.map` missing 1 required positional argument: 'fn'. `fn`: takes an element"),
    (lambda: ROWS.batch(2, drop_last=True), r"'drop_last'\. Instead: `drop_remainder=True`"),
    (lambda: MADE.shuffle(buffer_size=100), "`RowDataset.shuffle` has no argument 'buffer_size'. Leave it out"),
    (lambda: MADE.map(print, num_parallel_calls=4), "`RowDataset.map` has no argument 'num_parallel_calls'. Leave it"),
    (lambda: MADE.batch(2, num_parallel_calls=4), "`RowDataset.batch` has no argument 'num_parallel_calls'. Leave it"),
])
def test_an_argument_of_another_datasets_says_what_to_write(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(("dataset", "message"), [
    (ROWS.map(lambda row: row[0]), r"2 in all\. Received: .* parameters \(row\)\. Write `lambda x, y: \.\.\.`"),
    (ROWS.batch(2).map(lambda row: row[0]), r"parameters \(row\)\. Write `lambda x, y: \.\.\.`"),
    (ROWS.map(lambda x, y: x).map(lambda x, y: x), r"1 in all\. Received: .* \(x, y\)\. Write `lambda x: \.\.\.`"),
    (data.Dataset.from_arrays((Y,) * 4).map(lambda row: row), r"4 in all\. .* Write `lambda \*parts: \.\.\.`"),
    (MADE.random_map(lambda x, y: x), r"3 in all\. .* Write `lambda rng, x, y: \.\.\.`"),
    (MADE.map(lambda row: row), r"2 in all\. .* Write `lambda x, y: \.\.\.`"),
])
def test_a_function_of_map_with_other_parameters_is_told_its_arguments(dataset, message):
    with pytest.raises(TypeError, match=message):
        next(iter(dataset))


@pytest.mark.parametrize("fn", [lambda x, y: x + None, max], ids=["own", "builtin"])
def test_a_functions_own_type_error_stays_itself(fn):
    dataset = data.Dataset.from_arrays(({"a": X}, Y)).map(fn)
    with pytest.raises(TypeError, match=r"unsupported operand|not supported between"):
        next(iter(dataset))
