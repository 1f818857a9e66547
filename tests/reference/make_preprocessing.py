"""Writes preprocessing.json: what Keras's preprocessing layers return for generated inputs.

Origin of the numbers: Keras 3.15.1, JAX backend, with TensorFlow 2.21, which these layers need. Run, where both are
installed: `KERAS_BACKEND=jax python tests/reference/make_preprocessing.py`
"""

import json
import pathlib
import random

import keras
import numpy as np
import tensorflow as tf

numbers = np.random.default_rng(0)  # inputs that are added at the end leave all others as they are
letters = random.Random(0)

ALPHABET = ["a", "b", "Z", "é", "ß", "漢", "🙂", "!", "-", "1"]


def word(longest=6):
    return "".join(letters.choices(ALPHABET, k=letters.randint(1, longest)))


def some(words, *shape):
    return np.array(words)[numbers.integers(0, len(words), shape)].tolist()


def text(longest=9):
    return "".join(word() + letters.choice([" ", "  ", "\t", "\n", "\xa0", ". ", "\u2003", "\x1f"])
                   for _ in range(letters.randint(0, longest)))


WORDS = list(dict.fromkeys(word() for _ in range(12)))
LONG_WORDS = ["".join(letters.choices("abcdefgh é", k=length)) for length in (0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33,
                                                                            63, 64, 65, 127, 130, 300)]
INTEGERS = [-7, 0, 1, 3, 12, 1138, 2**31, -2**40]

INPUTS = {
    "matrix": numbers.normal(3, 2, (20, 3)).round(4).tolist(),
    "batches": [numbers.normal(2, 4, (rows, 3)).round(4).tolist() for rows in (7, 5, 9)],
    "images": numbers.uniform(0, 255, (3, 2, 4, 2)).round(2).tolist(),
    "vector": numbers.normal(0, 1, 30).round(4).tolist(),
    "whole_numbers": numbers.integers(-20, 20, (15, 2)).tolist(),
    "many": numbers.normal(0, 10, 700).round(3).tolist(),
    "many_batches": [numbers.exponential(5, rows).round(3).tolist() for rows in (120, 1, 300, 64)],
    "indices": numbers.integers(0, 6, (5, 4)).tolist(),
    "column_of_indices": numbers.integers(0, 6, (5, 1)).tolist(),
    "list_of_indices": numbers.integers(0, 6, 5).tolist(),
    "index": 3,
    "weights": numbers.uniform(0, 2, (5, 4)).round(3).tolist(),
    "weights_of_list": numbers.uniform(0, 2, 5).round(3).tolist(),
    "words": some(WORDS, 40), "word_rows": some(WORDS, 8, 5), "column_of_words": some(WORDS, 6, 1),
    "new_words": some([*WORDS, *(word() for _ in range(6)), ""], 7, 4), "new_list": some([*WORDS, word(), word()], 9),
    "long_words": LONG_WORDS, "word": WORDS[3],
    "integers": some(INTEGERS, 40), "integer_rows": some(INTEGERS, 8, 5),
    "new_integers": some([*INTEGERS, 5, 6, -1, 99], 7, 4), "column_of_integers": some([*INTEGERS, 5, 99], 9, 1),
    "floats": [1.9, -1.9, 0.2, 1e6, -3.0],
    "places": [[0, 1, 2], [5, 100, -1]],
    "texts": [text() for _ in range(25)], "new_texts": [text() for _ in range(6)],
    "column_of_texts": [[text()] for _ in range(4)], "text": text(),
    "text_batches": [[text() for _ in range(count)] for count in (4, 1, 6)],
    "pair": [some(WORDS, 8), some(INTEGERS, 8)], "pair_of_columns": [some(WORDS, 6, 1), some(WORDS, 6, 1)],
    "triple": [some(WORDS, 8), some(INTEGERS, 8), some(WORDS, 8)], "pair_of_scalars": [WORDS[0], 3],
    "pair_of_integers": [some(INTEGERS, 8), some(INTEGERS, 8)],
}

VOCABULARY = WORDS[:6]
IDF = [0.5, 1.25, 2.0, 0.75, 1.0, 3.0]

# Layer, its arguments, the inputs of `adapt` or None, the inputs of the call.
CASES = [
    *(("Normalization", config, adapt, "matrix")
      for config in ({}, {"axis": None}, {"axis": 1}, {"invert": True}, {"axis": (1,)})
      for adapt in ("matrix", "batches")),
    *(("Normalization", config, "images", "images")
      for config in ({}, {"axis": (1, 3)}, {"axis": None}, {"axis": -2, "invert": True})),
    ("Normalization", {"axis": None}, "vector", "vector"),
    ("Normalization", {}, "whole_numbers", "whole_numbers"),
    ("Normalization", {"mean": 3.0, "variance": 2.0}, None, "matrix"),
    ("Normalization", {"mean": [1.0, 2.0, 3.0], "variance": [1.0, 4.0, 0.0]}, None, "matrix"),
    ("Normalization", {"axis": (1, 3), "mean": [1.0, 2.0], "variance": [1.0, 4.0]}, None, "images"),
    *(("Discretization", {"num_bins": bins, **config}, adapt, "matrix")
      for bins, config in ((4, {}), (10, {}), (3, {"epsilon": 0.2}), (1, {})) for adapt in ("many", "many_batches")),
    ("Discretization", {"num_bins": 50}, "vector", "vector"),
    *(("Discretization", {"bin_boundaries": [-1.0, 0.1, 2.0, 3.5], "output_mode": mode}, None, inputs)
      for mode in ("int", "one_hot", "multi_hot", "count") for inputs in ("matrix", "vector", "whole_numbers")),
    *(("CategoryEncoding", {"num_tokens": 6, "output_mode": mode}, None, inputs)
      for mode in ("one_hot", "multi_hot", "count")
      for inputs in ("indices", "column_of_indices", "list_of_indices", "index")),
    *(("Hashing", {"num_bins": bins, **config}, None, inputs)
      for bins in (1, 3, 1000) for config in ({}, {"salt": 1337}, {"salt": [133, 2**40]})
      for inputs in ("long_words", "integers", "floats")),
    *(("Hashing", {"num_bins": 4, "mask_value": mask}, None, inputs)
      for mask, inputs in (("", "long_words"), (WORDS[0], "word_rows"), (0, "integers"), (3, "integer_rows"))),
    *(("Hashing", {"num_bins": 4, "output_mode": mode}, None, inputs) for mode in ("one_hot", "multi_hot", "count")
      for inputs in ("word_rows", "column_of_words", "words", "integer_rows")),
    *(("Hashing", {"num_bins": 4, "output_mode": mode}, None, "word") for mode in ("int", "multi_hot", "count")),
    *(("HashedCrossing", {"num_bins": bins}, None, inputs) for bins in (5, 10**6)
      for inputs in ("pair", "pair_of_columns", "triple", "pair_of_scalars", "pair_of_integers")),
    *(("HashedCrossing", {"num_bins": 5, "output_mode": "one_hot"}, None, inputs)
      for inputs in ("pair", "pair_of_columns", "pair_of_scalars")),
    *(("StringLookup", config, adapt, inputs)
      for config in ({}, {"max_tokens": 6}, {"num_oov_indices": 3}, {"num_oov_indices": 3, "salt": 7},
                     {"mask_token": ""}, {"mask_token": WORDS[1], "oov_token": WORDS[2], "num_oov_indices": 2})
      for adapt, inputs in (("words", "new_words"), ("word_rows", "new_list"), ("words", "word"))),
    *(("StringLookup", {"output_mode": mode, **config}, adapt, inputs)
      for mode in ("one_hot", "multi_hot", "count", "tf_idf")
      for config in ({}, {"max_tokens": 20, "pad_to_max_tokens": True, "mask_token": "", "num_oov_indices": 2})
      for adapt, inputs in (("word_rows", "new_words"), ("words", "new_list"), ("word_rows", "column_of_words"))),
    *(("StringLookup", {"vocabulary": vocabulary, "output_mode": "tf_idf", "idf_weights": weights, **config}, None,
       "new_words") for vocabulary, weights, config in (
        (VOCABULARY, IDF, {}), (["[UNK]", *VOCABULARY], [9.0, *IDF], {}),
        (VOCABULARY, IDF, {"max_tokens": 12, "pad_to_max_tokens": True, "num_oov_indices": 2}))),
    ("StringLookup", {"vocabulary": ["", "[UNK]", *VOCABULARY], "mask_token": ""}, None, "new_words"),
    ("StringLookup", {"vocabulary": VOCABULARY, "invert": True}, None, "places"),
    ("StringLookup", {"vocabulary": VOCABULARY, "invert": True, "mask_token": ""}, None, "places"),
    ("StringLookup", {"vocabulary": WORDS, "num_oov_indices": 0}, None, "words"),
    *(("IntegerLookup", config, adapt, inputs)
      for config in ({}, {"max_tokens": 5}, {"num_oov_indices": 3}, {"mask_token": 0},
                     {"num_oov_indices": 3, "oov_method": "farmhash"}, {"mask_token": 3, "num_oov_indices": 2},
                     {"num_oov_indices": 3, "oov_method": "farmhash", "salt": [1, 2]})
      for adapt, inputs in (("integers", "new_integers"), ("integer_rows", "column_of_integers"))),
    *(("IntegerLookup", {"output_mode": mode, "mask_token": 1}, "integer_rows", inputs)
      for mode in ("one_hot", "multi_hot", "count", "tf_idf") for inputs in ("new_integers", "column_of_integers")),
    ("IntegerLookup", {"vocabulary": INTEGERS, "invert": True}, None, "places"),
    *(("TextVectorization", config, adapt, inputs)
      for config in ({}, {"standardize": "lower", "ngrams": 2}, {"standardize": None, "output_sequence_length": 5},
                     {"standardize": "strip_punctuation", "split": "character", "max_tokens": 8},
                     {"output_mode": "multi_hot"}, {"output_mode": "count", "ngrams": (1, 3)},
                     {"output_mode": "tf_idf"}, {"output_mode": "tf_idf", "max_tokens": 30, "pad_to_max_tokens": True})
      for adapt, inputs in (("texts", "new_texts"), ("text_batches", "column_of_texts"), ("texts", "text"))),
    ("TextVectorization", {"split": None, "output_sequence_length": 3}, "word_rows", "new_words"),
    ("TextVectorization", {"vocabulary": VOCABULARY}, None, "new_texts"),
]

TABLE = {"size": numbers.normal(3, 5, 90).round(3).tolist(), "age": numbers.integers(1, 9, 90).tolist(),
         "city": some(WORDS, 90), "price": numbers.exponential(9, 90).round(3).tolist()}
ROWS = {"size": [0.5, 9.0, -3.0], "age": [4, 77, 1], "city": [WORDS[0], WORDS[5], "elsewhere"],
        "price": [0.1, 5.0, 99.0]}

# Features by name, as words or as the method and its arguments; crosses, as names or with arguments; output mode.
SPACES = [
    ({"size": "float_normalized", "age": "integer_categorical", "city": "string_categorical", "price": "float"}, None,
     "concat"),
    ({"size": "float_discretized", "age": "integer_hashed", "city": "string_hashed", "price": "float_rescaled"},
     [["city", "age"]], "concat"),
    ({"size": ["float_discretized", {"num_bins": 4}], "age": ["integer_categorical", {"max_tokens": 5}],
      "city": ["string_categorical", {"num_oov_indices": 2}],
      "price": ["float_rescaled", {"scale": 0.5, "offset": 2.0}]},
     [{"feature_names": ["age", "city"], "crossing_dim": 7}, ["city", "size"]], "concat"),
    ({"size": ["float_discretized", {"num_bins": 4, "output_mode": "int"}],
      "age": ["integer_hashed", {"num_bins": 6, "output_mode": "int"}],
      "city": ["string_categorical", {"output_mode": "int"}], "price": "float_normalized"},
     [{"feature_names": ["size", "city"], "crossing_dim": 9, "output_mode": "int"}], "dict"),
]


def fed(inputs, is_batches):
    """Returns inputs as Keras takes them."""
    if is_batches:
        return [fed(batch, False) for batch in inputs]
    if isinstance(inputs, list) and isinstance(inputs[0], float):
        return np.array(inputs, np.float32)
    values = np.array(inputs)
    return tf.constant(inputs) if values.dtype.kind == "U" else values


def plain(value):
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    array = np.asarray(value)
    if array.dtype.kind in "OS":
        return np.char.decode(array.astype(bytes), "utf-8").tolist()
    return array.astype(np.float32).tolist() if array.dtype.kind == "f" else array.tolist()


def kind(value):
    return np.asarray(value).dtype.kind


def cases():
    for name, config, adapt, inputs in CASES:
        layer = getattr(keras.layers, name)(**config)
        case = {"layer": name, "config": config, "adapt": adapt, "inputs": inputs}
        if adapt is not None:
            batches = adapt.endswith("batches")
            data = fed(INPUTS[adapt], batches)
            layer.adapt((batch for batch in data) if batches else data)
        called = ([fed(part, False) for part in INPUTS[inputs]] if name == "HashedCrossing" else
                  fed(INPUTS[inputs], False))
        if name == "Normalization" and adapt is None:
            layer.build(called.shape)
        # Keras's own call returns TensorFlow's strings as JAX's, which have none.
        result = type(layer).__mro__[1].call(layer, called) if config.get("invert") and name == "StringLookup" else (
            layer(called))
        case |= {"result": plain(result), "kind": kind(result)}
        if hasattr(layer, "get_vocabulary"):
            case["vocabulary"] = [word if isinstance(word, str) else int(word) for word in layer.get_vocabulary()]
        if name == "Discretization":
            case["bin_boundaries"] = layer.bin_boundaries
        yield case


def spaces():
    make = keras.utils.FeatureSpace
    for features, crosses, mode in SPACES:
        made = {name: kind if isinstance(kind, str) else getattr(make, kind[0])(**kind[1])
                for name, kind in features.items()}
        crossed = [make.cross(**cross) if isinstance(cross, dict) else cross for cross in crosses or ()]
        space = make(made, output_mode=mode, crosses=crossed)
        space.adapt(tf.data.Dataset.from_tensor_slices(TABLE))
        yield {"features": features, "crosses": crosses, "output_mode": mode, "result": plain(space(ROWS)),
               "row": plain(space({name: column[0] for name, column in ROWS.items()}))}


if __name__ == "__main__":
    reference = {
        "origin": f"Keras {keras.__version__}, {keras.backend.backend().upper()} backend, TensorFlow {tf.__version__}",
        "inputs": INPUTS, "table": TABLE, "rows": ROWS, "cases": list(cases()), "spaces": list(spaces()),
    }
    lines = json.dumps(reference).replace('{"layer"', '\n{"layer"').replace('{"features"', '\n{"features"')
    pathlib.Path(__file__).with_name("preprocessing.json").write_text(lines + "\n")
