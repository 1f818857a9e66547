"""Windows of a series and texts from folders."""

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.data import text_dataset_from_directory, timeseries_dataset_from_array

SERIES = np.arange(20)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


def windows(**options):
    arguments = {"data": SERIES, "targets": SERIES * 10, "sequence_length": 4, "batch_size": 3, **options}
    return [(x.tolist(), y.tolist()) for batch in timeseries_dataset_from_array(**arguments)
            for x, y in zip(*batch, strict=True)]


@pytest.mark.parametrize(("options", "first", "last", "count"), [
    ({}, ([0, 1, 2, 3], 0), ([16, 17, 18, 19], 160), 17),
    ({"sequence_stride": 3, "sampling_rate": 2}, ([0, 2, 4, 6], 0), ([12, 14, 16, 18], 120), 5),
    ({"start_index": 5, "end_index": 11}, ([5, 6, 7, 8], 50), ([7, 8, 9, 10], 70), 3),
    ({"targets": SERIES[:4]}, ([0, 1, 2, 3], 0), ([3, 4, 5, 6], 3), 4),
    ({"targets": SERIES[:8], "start_index": 5}, ([5, 6, 7, 8], 5), ([7, 8, 9, 10], 7), 3),
])
def test_windows_and_their_targets(options, first, last, count):
    found = windows(**options)
    assert (found[0], found[-1], len(found)) == (first, last, count)


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, 0, 3, 7])
@pytest.mark.parametrize("end", [None, 14, 19])
@pytest.mark.parametrize(("stride", "rate"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_windows_are_those_of_keras(keras, start, end, stride, rate):
    options = {"start_index": start, "end_index": end, "sequence_stride": stride, "sampling_rate": rate}
    theirs = keras.utils.timeseries_dataset_from_array(SERIES, SERIES * 10, 4, batch_size=3, format="grain", **options)
    assert windows(format="grain", **options) == [(np.asarray(x).tolist(), int(y)) for batch in theirs
                                  for x, y in zip(*batch, strict=True)]


def test_windows_without_targets_and_of_several_features():
    data = np.stack([SERIES, -SERIES], 1)
    batch = next(iter(timeseries_dataset_from_array(data, None, 3, batch_size=2)))
    assert batch.tolist() == [[[0, 0], [1, -1], [2, -2]], [[1, -1], [2, -2], [3, -3]]]


@pytest.mark.slow
def test_shuffled_windows_are_the_same_windows_and_can_be_trained_on():
    assert sorted(windows(shuffle=True, seed=3)) == windows() != windows(shuffle=True, seed=3)
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    data = timeseries_dataset_from_array(SERIES / 20, SERIES[4:] / 20, 4, batch_size=5, shuffle=True)
    losses = model.fit(data, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("options", [{"sequence_length": 30}, {"start_index": 9, "end_index": 3}, {"end_index": 21},
                                     {"sequence_stride": 0}, {"format": "window"}])
def test_windows_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=r"window|index|stride"):
        windows(**options)


@pytest.fixture
def folder(tmp_path):
    for name, words in (("bad", ["poor", "dull", "flat"]), ("good", ["fine", "warm"])):
        (tmp_path / name).mkdir()
        for number, word in enumerate(words):
            (tmp_path / name / f"{number}.txt").write_text(word)
    return tmp_path


def letters(text):
    return np.array([ord(letter) - ord("a") for letter in text], np.int32)


@pytest.mark.slow
def test_texts_are_encoded_and_trained_on(folder):
    dataset = text_dataset_from_directory(folder, letters, batch_size=2, shuffle=False, verbose=False)
    rows = [("".join(chr(number + ord("a")) for number in x), int(y))
            for batch in dataset for x, y in zip(*batch, strict=True)]
    assert rows == [("poor", 0), ("dull", 0), ("flat", 0), ("fine", 1), ("warm", 1)]
    model = trainer.Model(nn.Sequential([nn.Embed(26, 4), lambda x: x.mean(1), nn.Dense(1)]))
    model.compile("adam", trainer.losses.BinaryCrossentropy(from_logits=True))
    binary = text_dataset_from_directory(folder, letters, label_mode="binary", batch_size=2, verbose=False)
    losses = model.fit(binary, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_a_text_that_cannot_be_read_is_named(folder):
    (folder / "bad" / "0.txt").write_bytes(b"\xff\xfe\xff")
    dataset = text_dataset_from_directory(folder, letters, verbose=False, batch_size=None)
    with pytest.raises(ValueError, match=r"0\.txt' cannot be read.*UTF-8"):
        [dataset.rows[number] for number in range(5)]


def test_texts_of_several_lengths_are_refused_by_file(folder):
    (folder / "bad" / "1.txt").write_text("dullest")
    dataset = text_dataset_from_directory(folder, letters, verbose=False, shuffle=False)
    with pytest.raises(ValueError, match=r"one shape.*\(7,\) for .*1\.txt', and \(4,\) for .*0\.txt'"):
        [dataset.rows[number] for number in range(5)]


@pytest.mark.parametrize(("encode", "message"), [
    (lambda text: text.split(), r"array of numbers.*0\.txt'"),
    (lambda text: [1, [2]], r"`encode` failed for the text .*0\.txt': ValueError"),
    (lambda text: {}[text], r"`encode` failed for the text .*0\.txt': KeyError: 'poor'"),
])
def test_an_encoder_that_fails_is_named_with_the_file(folder, encode, message):
    dataset = text_dataset_from_directory(folder, encode, verbose=False, shuffle=False)
    with pytest.raises(ValueError, match=message):
        dataset.rows[0]


def test_an_encoder_must_be_a_function(folder):
    with pytest.raises(TypeError, match="`encode` must be a function"):
        text_dataset_from_directory(folder, "utf-8")


def test_the_mark_of_utf_8_at_the_beginning_is_no_text(folder):
    (folder / "bad" / "0.txt").write_text("poor", encoding="utf-8-sig")
    dataset = text_dataset_from_directory(folder, letters, verbose=False, shuffle=False)
    assert dataset.rows[0][0].tolist() == letters("poor").tolist()


def test_texts_stay_texts_until_a_map_makes_numbers_of_them(folder):
    dataset = text_dataset_from_directory(folder, batch_size=2, shuffle=False, verbose=False)
    assert [x.tolist() for x, _ in dataset] == [["poor", "dull"], ["flat", "fine"], ["warm"]]
    layer = trainer.data.preprocessing.TextVectorization(output_sequence_length=2, split="character")
    layer.adapt(dataset)
    x, y = next(iter(dataset.map(lambda texts, labels: (layer(texts), labels))))
    assert x.tolist() == layer(["poor", "dull"]).tolist() and y.tolist() == [0, 0]
    model = trainer.Sequential([nn.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"trainer\.data\.preprocessing"):
        model.fit(dataset, verbose=0)
