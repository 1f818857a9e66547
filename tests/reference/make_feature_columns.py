"""Writes feature_columns.json: what TensorFlow's feature columns and the optimizers of its estimators compute.

Run once, in an environment with TensorFlow 2.15: `python tests/reference/make_feature_columns.py`. A column is a nested
dict of calls, which the tests make with this project's functions of the same names.
"""

import json
import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

STEPS = 20


def call(name, *args, **kwargs):
    return {"call": name, "args": list(args), "kwargs": kwargs}


def words_file(*lines):
    return {"file": list(lines)}


NORMALIZERS = {"shift_and_scale": lambda x: (x - 3.0) / 4.2, "square": lambda x: x * x}
COLORS = ["red", "green", "blue"]
X = call("numeric_column", "x")
PRICE = call("bucketized_column", X, [0.0, 1.0, 10.0])
COLOR = call("categorical_column_with_vocabulary_list", "color", COLORS)
CITY = call("categorical_column_with_hash_bucket", "city", 10)
DAY = call("categorical_column_with_identity", "day", 7)
WORDS = call("categorical_column_with_vocabulary_list", "words", ["a", "b", "c", "d"])
WEIGHTED = call("weighted_categorical_column", WORDS, "weights")
EDGES = [[-1.0], [0.0], [0.5], [1.0], [9.999], [10.0], [1e9], [-0.0]]
SOME_COLORS = ["green", "red", "", "purple", "blue"]
SOME_CITIES = ["Oslo", "Rome", "", "São Paulo", "Xi'an"]
SOME_WORDS = [["a", "b", "c"], ["d", "d", ""], ["", "", ""], ["b", "zzz", ""], ["c", "a", "c"]]
SOME_WEIGHTS = [[1.0, 2.0, 0.5], [3.0, 0.25, 0.0], [0.0, 0.0, 0.0], [2.0, 1.5, 0.0], [0.5, 0.5, 4.0]]
SOME_DAYS = [0, 6, 3, -1, 3]
SOME_X = [0.5, -2.0, 30.0, 1.0, 4.0]
EVERYTHING = {"x": SOME_X, "color": SOME_COLORS, "city": SOME_CITIES, "words": SOME_WORDS, "day": SOME_DAYS,
              "weights": SOME_WEIGHTS}

ODD_WORDS = [["a", "zzz", "a"], ["", "b", "q"]]


def vocabulary(key, *args, **kwargs):
    return call("categorical_column_with_vocabulary_list", key, *args, **kwargs)


# The ids of one categorical column, -1 where there is none.
IDS = {
    "vocabulary: words have the numbers of their places": (COLOR, {"color": SOME_COLORS}),
    "vocabulary: unknown words are left out by default": (WORDS, {"words": ODD_WORDS}),
    "vocabulary: unknown words get the default value": (
        vocabulary("words", ["a", "b"], default_value=1), {"words": ODD_WORDS}),
    "vocabulary: unknown words get buckets of their hashes": (
        vocabulary("words", ["a", "b"], num_oov_buckets=5), {"words": [["a", "x", "yy"], ["zzz", "", "ü"]]}),
    "vocabulary: whole numbers": (vocabulary("n", [10, 20, 30]), {"n": [[10, 30], [-1, 20], [40, 10]]}),
    "vocabulary: unknown whole numbers get buckets of their decimal text": (
        vocabulary("n", [10, 20, 30], num_oov_buckets=100), {"n": [[10, 7], [-1, 123456789], [-20, -7]]}),
    "vocabulary file: words have the numbers of their lines": (
        call("categorical_column_with_vocabulary_file", "color", words_file(*COLORS)), {"color": SOME_COLORS}),
    "vocabulary file: only the first lines are read": (
        call("categorical_column_with_vocabulary_file", "color", words_file(*COLORS), 2), {"color": SOME_COLORS}),
    "vocabulary file: unknown words get buckets of their hashes": (
        call("categorical_column_with_vocabulary_file", "color", words_file(*COLORS), num_oov_buckets=4),
        {"color": SOME_COLORS}),
    "vocabulary file: unknown words get the default value": (
        call("categorical_column_with_vocabulary_file", "color", words_file(*COLORS), default_value=2),
        {"color": SOME_COLORS}),
    "identity: numbers are ids, and -1 is missing": (DAY, {"day": [[0, 6], [-1, 3]]}),
    "identity: numbers out of range get the default value": (
        call("categorical_column_with_identity", "day", 7, default_value=2), {"day": [[0, 7], [-1, 3], [-5, 100]]}),
    "hash: words": (CITY, {"city": SOME_CITIES}),
    "hash: several words a row": (
        call("categorical_column_with_hash_bucket", "words", 1000), {"words": SOME_WORDS}),
    "hash: whole numbers by their decimal text": (
        call("categorical_column_with_hash_bucket", "n", 1000, {"dtype": "int64"}),
        {"n": [[0, 7], [-1, 123456789], [-20, 2**40]]}),
    "bucketized: a number on an edge falls to the right": (PRICE, {"x": EDGES}),
    "bucketized: each number of a row has its own buckets": (
        call("bucketized_column", call("numeric_column", "x", shape=2), [0.0, 1.0]), {"x": [[-1.0, 5.0], [0.5, 0.0]]}),
    "bucketized: the normalizer comes first": (
        call("bucketized_column", call("numeric_column", "x", normalizer_fn={"function": "shift_and_scale"}),
             [-0.5, 0.0, 0.5]), {"x": [[0.0], [3.0], [5.0], [6.0]]}),
    "crossed: two features of words": (
        call("crossed_column", ["color", "city"], 100), {"color": SOME_COLORS, "city": SOME_CITIES}),
    "crossed: the order of the keys counts": (
        call("crossed_column", ["city", "color"], 100), {"color": SOME_COLORS, "city": SOME_CITIES}),
    "crossed: three features of words": (
        call("crossed_column", ["color", "city", "sex"], 2**31 - 1),
        {"color": SOME_COLORS, "city": SOME_CITIES, "sex": ["m", "f", "f", "", "d"]}),
    "crossed: another hash key": (
        call("crossed_column", ["color", "city"], 1000, hash_key=1234567),
        {"color": SOME_COLORS, "city": SOME_CITIES}),
    "crossed: a vocabulary with a feature": (
        call("crossed_column", ["city", COLOR], 1000), {"color": SOME_COLORS, "city": SOME_CITIES}),
    "crossed: buckets with a vocabulary": (
        call("crossed_column", [PRICE, COLOR], 1000), {"color": SOME_COLORS, "x": SOME_X}),
    "crossed: identities with words and buckets": (
        call("crossed_column", ["color", DAY, PRICE], 5000), {"color": SOME_COLORS, "day": SOME_DAYS, "x": SOME_X}),
    "crossed: several values of a row in all combinations": (
        call("crossed_column", ["words", "pairs"], 1000),
        {"words": SOME_WORDS, "pairs": [["p", "q"], ["r", "s"], ["t", "u"], ["v", "w"], ["p", "p"]]}),
    "crossed: several values of a vocabulary": (
        call("crossed_column", [WORDS, COLOR], 1000), {"words": SOME_WORDS, "color": SOME_COLORS}),
    "crossed: a cross of a cross": (
        call("crossed_column", ["city", call("crossed_column", ["color", DAY], 10)], 1000),
        {"color": SOME_COLORS, "city": SOME_CITIES, "day": SOME_DAYS}),
    "crossed: whole numbers by key": (
        call("crossed_column", ["day", "color"], 1000), {"color": SOME_COLORS, "day": SOME_DAYS}),
    "weighted: the ids of the column": (WEIGHTED, {"words": SOME_WORDS, "weights": SOME_WEIGHTS}),
}


def embedding(column, **kwargs):
    return call("embedding_column", column, 2, **kwargs)


def dense(*columns, **features):
    return list(columns), features


# What DenseFeatures makes of columns.
DENSE = {
    "numeric: numbers are float32": dense(X, x=[1, 2, 3]),
    "numeric: a shape is flattened": dense(call("numeric_column", "x", shape=[2, 2]), x=[[[1, 2], [3, 4]]]),
    "numeric: the normalizer": dense(call("numeric_column", "x", normalizer_fn={"function": "square"}), x=SOME_X),
    "bucketized: one-hot": dense(PRICE, x=EDGES),
    "bucketized: a shape is flattened": dense(
        call("bucketized_column", call("numeric_column", "x", shape=2), [0.0, 1.0]), x=[[-1.0, 5.0], [0.5, 0.0]]),
    "indicator: one-hot, and zeros for what is unknown": dense(call("indicator_column", COLOR), color=SOME_COLORS),
    "indicator: counts of several values": dense(call("indicator_column", WORDS), words=SOME_WORDS),
    "indicator: of hashes": dense(call("indicator_column", CITY), city=SOME_CITIES),
    "indicator: of identities": dense(call("indicator_column", DAY), day=SOME_DAYS),
    "indicator: of buckets": dense(call("indicator_column", PRICE), x=SOME_X),
    "indicator: of crosses": dense(
        call("indicator_column", call("crossed_column", ["color", "city"], 6)), color=SOME_COLORS, city=SOME_CITIES),
    "indicator: of weights": dense(
        call("indicator_column", WEIGHTED), words=[["a", "b", "a"]], weights=[[1.0, 2.0, 0.5]]),
    "embedding: a row of the table": dense(embedding(COLOR), color=SOME_COLORS),
    "embedding: the mean by default": dense(embedding(WORDS), words=SOME_WORDS),
    "embedding: the sum": dense(embedding(WORDS, combiner="sum"), words=SOME_WORDS),
    "embedding: the sum over the root of the number": dense(embedding(WORDS, combiner="sqrtn"), words=SOME_WORDS),
    "embedding: rows of at most a norm": dense(embedding(WORDS, max_norm=0.5), words=SOME_WORDS),
    "embedding: of crosses": dense(
        embedding(call("crossed_column", ["words", "color"], 20)), words=SOME_WORDS, color=SOME_COLORS),
    "embedding: of buckets of several numbers": dense(
        embedding(call("bucketized_column", call("numeric_column", "x", shape=2), [0.0, 1.0])),
        x=[[-1.0, 5.0], [0.5, 0.0]]),
    "embedding: of identities": dense(embedding(DAY), day=SOME_DAYS),
    **{f"embedding: of weights, {combiner}": dense(
        embedding(WEIGHTED, combiner=combiner), words=[["a", "b"], ["c", "d"], ["d", "a"]],
        weights=[[1.0, 2.0], [0.5, -1.5], [-1.0, -0.5]]) for combiner in ("mean", "sqrtn", "sum")},
    "shared embeddings: one table for two columns": (
        [{"call": "shared_embeddings", "args": [
            [call("categorical_column_with_identity", key, 5) for key in ("shown", "bought")], 2], "kwargs": {}}],
        {"shown": [[0, 1], [4, -1]], "bought": [[2], [1]]}),
    "columns: sorted by name": dense(
        embedding(WORDS), X, call("indicator_column", COLOR), PRICE, embedding(CITY), embedding(DAY),
        **{key: EVERYTHING[key] for key in ("words", "x", "color", "city", "day")}),
}


def linear(*columns, units=1, sparse_combiner="sum", **features):
    return list(columns), features, units, sparse_combiner


# What a linear model of two outputs or one makes of columns.
LINEAR = {
    "linear: numbers": linear(X, x=SOME_X),
    "linear: several numbers a row": linear(call("numeric_column", "x", shape=2), units=2, x=[[1, 2], [3, 4]]),
    "linear: words as they are": linear(COLOR, color=SOME_COLORS),
    "linear: several words a row": linear(WORDS, units=2, words=SOME_WORDS),
    "linear: the mean of several words": linear(WORDS, sparse_combiner="mean", words=SOME_WORDS),
    "linear: the sum of several words over the root of their number": linear(
        WORDS, sparse_combiner="sqrtn", words=SOME_WORDS),
    "linear: buckets": linear(PRICE, x=EDGES),
    "linear: buckets of several numbers, their mean": linear(
        call("bucketized_column", call("numeric_column", "x", shape=2), [0.0, 1.0]), sparse_combiner="mean",
        x=[[-1.0, 5.0], [0.5, 0.0]]),
    "linear: hashes": linear(CITY, city=SOME_CITIES),
    "linear: identities": linear(DAY, day=SOME_DAYS),
    "linear: crosses": linear(call("crossed_column", ["color", "city"], 6), color=SOME_COLORS, city=SOME_CITIES),
    "linear: weights": linear(WEIGHTED, words=[["a", "b"], ["c", "d"]], weights=[[1.0, 2.0], [0.5, -1.5]]),
    "linear: indicators": linear(call("indicator_column", WORDS), words=SOME_WORDS),
    "linear: embeddings": linear(embedding(WORDS), words=SOME_WORDS),
    "linear: everything at once": linear(
        X, PRICE, COLOR, CITY, DAY, WORDS, units=3, **{key: EVERYTHING[key] for key in EVERYTHING if key != "weights"}),
}

WATCHED = call("sequence_categorical_column_with_identity", "watched", 5)
SPOKEN = call("sequence_categorical_column_with_vocabulary_list", "spoken", ["a", "b", "c"])
HEAT = call("sequence_numeric_column", "heat")
SOME_WATCHED = [[0, 4, 3], [2, -1, -1], [-1, -1, -1], [1, 1, -1]]
SOME_SPOKEN = [["a", "c", "b"], ["b", "", ""], ["", "", ""], ["a", "zzz", ""]]
SOME_HEAT = [[1.0, 2.0, 3.0], [4.0, None, None], [None, None, None], [5.0, 6.0, None]]

# What SequenceFeatures makes of columns; None is padding.
SEQUENCE = {
    "sequence: numbers": dense(HEAT, heat=SOME_HEAT),
    "sequence: numbers with padding of another value": dense(
        call("sequence_numeric_column", "heat", default_value=-9.0), heat=SOME_HEAT),
    "sequence: the normalizer leaves padding alone": dense(
        call("sequence_numeric_column", "heat", normalizer_fn={"function": "shift_sparse"}), heat=SOME_HEAT),
    "sequence: several numbers a step": dense(
        call("sequence_numeric_column", "heat", shape=2),
        heat=[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, None, None], [None, None, None, None]]),
    "sequence: indicators": dense(call("indicator_column", WATCHED), watched=SOME_WATCHED),
    "sequence: embeddings": dense(embedding(WATCHED), watched=SOME_WATCHED),
    "sequence: an unknown word is a step": dense(call("indicator_column", SPOKEN), spoken=SOME_SPOKEN),
    "sequence: hashes": dense(
        call("indicator_column", call("sequence_categorical_column_with_hash_bucket", "spoken", 4)),
        spoken=SOME_SPOKEN),
    "sequence: a vocabulary file": dense(
        call("indicator_column", call("sequence_categorical_column_with_vocabulary_file", "spoken",
                                      words_file("a", "b", "c"), num_oov_buckets=2)), spoken=SOME_SPOKEN),
    "sequence: columns sorted by name": dense(
        embedding(WATCHED), HEAT, watched=SOME_WATCHED, heat=SOME_HEAT),
}

# What TensorFlow refuses.
ERRORS = {
    "error: a categorical column in DenseFeatures": dense(COLOR, color=SOME_COLORS),
    "error: a missing feature": dense(X, y=SOME_X),
    "error: two columns of one name": dense(X, X, x=SOME_X),
    "error: no columns": dense(),
    "error: what is no column": dense("x", x=SOME_X),
    "error: an indicator of sequences in DenseFeatures": dense(call("indicator_column", WATCHED), watched=SOME_WATCHED),
    "error: boundaries that do not ascend": dense(call("bucketized_column", X, [1.0, 0.0]), x=SOME_X),
    "error: no boundaries": dense(call("bucketized_column", X, []), x=SOME_X),
    "error: buckets of what is not numeric": dense(call("bucketized_column", COLOR, [1.0]), x=SOME_X),
    "error: buckets of several axes": dense(
        call("bucketized_column", call("numeric_column", "x", shape=[2, 2]), [1.0]), x=SOME_X),
    "error: an empty vocabulary": dense(call("indicator_column", vocabulary("color", [])), color=SOME_COLORS),
    "error: a vocabulary with a word twice": dense(
        call("indicator_column", vocabulary("color", ["a", "a"])), color=SOME_COLORS),
    "error: a default value beside buckets": dense(
        call("indicator_column", vocabulary("color", ["a", "b"], default_value=1, num_oov_buckets=2)),
        color=SOME_COLORS),
    "error: words for a column of whole numbers": dense(
        call("indicator_column", vocabulary("color", [1, 2])), color=SOME_COLORS),
    "error: no vocabulary file": dense(
        call("indicator_column", call("categorical_column_with_vocabulary_file", "color", "/no/such/file")),
        color=SOME_COLORS),
    "error: a default id that is none": dense(
        call("indicator_column", call("categorical_column_with_identity", "day", 7, default_value=7)), day=SOME_DAYS),
    "error: no buckets": dense(
        call("indicator_column", call("categorical_column_with_identity", "day", 0)), day=SOME_DAYS),
    "error: no hash buckets": dense(
        call("indicator_column", call("categorical_column_with_hash_bucket", "city", 0)), city=SOME_CITIES),
    "error: one key crossed": dense(call("indicator_column", call("crossed_column", ["city"], 10)), city=SOME_CITIES),
    "error: hash buckets crossed": dense(
        call("indicator_column", call("crossed_column", [CITY, "color"], 10)), city=SOME_CITIES, color=SOME_COLORS),
    "error: numbers crossed": dense(
        call("indicator_column", call("crossed_column", [X, "color"], 10)), x=SOME_X, color=SOME_COLORS),
    "error: weights crossed": dense(
        call("indicator_column", call("crossed_column", [WEIGHTED, "color"], 10)), **EVERYTHING),
    "error: an embedding of no dimension": dense(call("embedding_column", COLOR, 0), color=SOME_COLORS),
    "error: an unknown combiner": dense(embedding(COLOR, combiner="median"), color=SOME_COLORS),
    "error: shared embeddings of two sizes": (
        [{"call": "shared_embeddings", "args": [[DAY, call("categorical_column_with_identity", "month", 12)], 2],
          "kwargs": {}}], {"day": SOME_DAYS, "month": SOME_DAYS}),
    "error: real numbers for ids": dense(call("indicator_column", DAY), day=[0.5, 1.5]),
}

OPTIMIZERS = [(name, rate) for name in ("Ftrl", "SGD", "Adagrad", "Adam", "RMSprop") for rate in (None, 0.2)]


def words_to_hash():
    letters = "".join(chr(ord("!") + place % 90) for place in range(0, 90 * 13, 13))
    lengths = [*range(68), 95, 96, 97, 127, 128, 129, 130, 191, 192, 193, 255, 256, 257, 1000]
    numbers = ["0", "1", "-1", "42", "123456789", "-9223372036854775808", "9223372036854775807"]
    return [(letters * 12)[length % 7:length % 7 + length] for length in lengths] + numbers + [
        "ü", "São Paulo", "日本語", "naïve café", "🙂", "🙂" * 5, "Ελλάδα" * 6, " ", "\t", "A", "a"]


def made(spec, folder):
    """Returns what a nested dict of calls describes."""
    if isinstance(spec, list):
        return [made(part, folder) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if "file" in spec:
        path = os.path.join(folder, "_".join(spec["file"]))
        pathlib.Path(path).write_text("\n".join(spec["file"]) + "\n")
        return path
    if "function" in spec:
        return (NORMALIZERS | {"shift_sparse": lambda x: tf.sparse.map_values(lambda v: v - 3.0, x)})[spec["function"]]
    if "dtype" in spec:
        return tf.as_dtype(spec["dtype"])
    kwargs = {name: made(value, folder) for name, value in spec["kwargs"].items()}
    return getattr(tf.feature_column, spec["call"])(*made(spec["args"], folder), **kwargs)


def made_columns(specs, folder):
    columns = []
    for column in made(specs, folder):
        columns += column if isinstance(column, list) else [column]
    return columns


def tensors(features):
    found = {}
    for key, values in features.items():
        flat = np.array(values, object)
        if any(value is None for value in flat.ravel()):
            where = np.argwhere(flat != None)  # noqa: E711 (an array of objects)
            found[key] = tf.SparseTensor(where, [float(flat[tuple(place)]) for place in where], flat.shape)
        else:
            array = np.array(values)
            found[key] = tf.constant(array.astype(np.float32) if array.dtype.kind == "f" else array)
    return found


def assigned(variables, session):
    """Gives all variables numbers of their own, and returns these by the last parts of the names."""
    weights = {}
    for place, variable in enumerate(sorted(variables, key=lambda variable: variable.name)):
        shape = variable.shape.as_list()
        numbers = np.sin(1.7 * np.arange(1, np.prod(shape) + 1) + 3 * place).round(4).astype(np.float32)
        session.run(tf.compat.v1.assign(variable, numbers.reshape(shape)))
        weights["/".join(variable.op.name.split("/")[-2:])] = numbers.reshape(shape).round(4).tolist()
    return weights


def run(compute):
    """Returns what `compute` computes in a graph of its own, and the weights of its variables."""
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder, tf.compat.v1.Session() as session:
        outputs = compute(folder)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
        weights = assigned(tf.compat.v1.global_variables(), session)
        return [listed(output) for output in session.run(outputs)], {
            name: [[float(f"{number:.4f}") for number in np.ravel(row)] for row in rows]
            if isinstance(rows[0], list) else [float(f"{number:.4f}") for number in rows]
            for name, rows in weights.items()}


def listed(array):
    array = np.asarray(array)
    if array.dtype.kind in "iu":
        return array.tolist()
    return np.vectorize(lambda number: float(f"{number:.9g}"))(array).tolist() if array.size else []


def ids_of(spec, features):
    def compute(folder):
        cache = tf.__internal__.feature_column.FeatureTransformationCache(tensors(features))
        ids = made(spec, folder).get_sparse_tensors(cache, None).id_tensor
        return [tf.sparse.to_dense(ids, default_value=-1)]

    (ids,), _ = run(compute)
    return ids


def dense_of(specs, features, layer=tf.keras.layers.DenseFeatures):
    def compute(folder):
        outputs = layer(made_columns(specs, folder))(tensors(features))
        return outputs if isinstance(outputs, tuple) else [outputs]

    outputs, weights = run(compute)
    return {"outputs": outputs, "weights": weights}


def linear_of(specs, features, units, sparse_combiner):
    from tensorflow_estimator.python.estimator.canned.linear import LinearModel

    def compute(folder):
        model = LinearModel(made_columns(specs, folder), units=units, sparse_combiner=sparse_combiner)
        return [model(tensors(features))]

    outputs, weights = run(compute)
    return {"outputs": outputs, "weights": weights}


def error_of(specs, features):
    try:
        dense_of(specs, features)
    except Exception as error:  # whatever TensorFlow raises
        return type(error).__name__
    return None


def trajectory(name, rate):
    """Returns the weights after steps down a bowl, from which every optimizer comes another way."""
    optimizer = getattr(tf.keras.optimizers.legacy, name)(**({} if rate is None else {"learning_rate": rate}))
    weights = tf.Variable([0.0, 0.5, -0.75, 2.0])
    after = []
    for _ in range(STEPS):
        grads = (weights - tf.constant([1.0, -1.0, 0.25, 0.0])) * tf.constant([1.0, 0.1, 3.0, 0.01])
        optimizer.apply_gradients([(grads, weights)])
        after.append(listed(weights.numpy()))
    return {"name": name, "learning_rate": rate, "weights": after}


def main():
    out_of_range, _ = run(lambda folder: [tf.keras.layers.DenseFeatures(
        [made(call("indicator_column", DAY), folder)])(tensors({"day": [3, 7, -2]}))])
    words = words_to_hash()
    reference = {
        "origin": f"TensorFlow {tf.__version__}",
        "hashes": [{"text": text, "ids": [
            int(tf.strings.to_hash_bucket_fast(text, buckets)) for buckets in (10, 1000, 2**31 - 1, 2**62 - 57)]}
            for text in words],
        "hash_buckets": [10, 1000, 2**31 - 1, 2**62 - 57],
        "identity out of range": out_of_range[0],
        "ids": [{"behaviour": name, "column": column, "features": features, "ids": ids_of(column, features)}
                for name, (column, features) in IDS.items()],
        "dense": [{"behaviour": name, "columns": columns, "features": features} | dense_of(columns, features)
                  for name, (columns, features) in DENSE.items()],
        "linear": [{"behaviour": name, "columns": columns, "features": features, "units": units,
                    "sparse_combiner": combiner} | linear_of(columns, features, units, combiner)
                   for name, (columns, features, units, combiner) in LINEAR.items()],
        "sequence": [{"behaviour": name, "columns": columns, "features": features}
                     | dense_of(columns, features, tf.keras.experimental.SequenceFeatures)
                     for name, (columns, features) in SEQUENCE.items()],
        "errors": [{"behaviour": name, "columns": columns, "features": features, "error": error_of(columns, features)}
                   for name, (columns, features) in ERRORS.items()],
        "optimizers": [trajectory(name, rate) for name, rate in OPTIMIZERS],
    }
    text = json.dumps(reference, ensure_ascii=False)
    for start in ('{"behaviour"', '{"text"', '{"name"'):  # one case a line
        text = text.replace(start, "\n" + start)
    pathlib.Path(__file__).with_name("feature_columns.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
