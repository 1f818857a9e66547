"""Fingerprints depend on the bytes alone: not on what else is in the batch, nor on the process."""

import os
import subprocess
import sys
import textwrap

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.support import project_files
from trainer.core.categories.fingerprints import DEFAULT_HASH_KEY, chain, fingerprint64

SCRIPT = textwrap.dedent("""
    import numpy as np
    from trainer.estimator.feature_columns import (
        HostTransform, categorical_column_with_hash_bucket, categorical_column_with_vocabulary_list, crossed_column)
    columns = [categorical_column_with_hash_bucket("city", 10**6), crossed_column(["city", "color"], 10**6),
               categorical_column_with_vocabulary_list("color", ["red"], num_oov_buckets=1000)]
    features = {"city": np.array(["Oslo", "Rome", "x" * 100]), "color": np.array(["red", "green", "blue"])}
    print({key: array.tolist() for key, array in HostTransform(columns)(features).items()})
""")


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.lists(st.binary(max_size=200), max_size=12))
def test_a_fingerprint_does_not_depend_on_the_others(texts):
    together = fingerprint64(texts)
    assert together.dtype == np.uint64
    assert together.tolist() == [int(fingerprint64([text])[0]) for text in texts]


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.binary(min_size=1, max_size=150), st.data())
def test_each_byte_counts(text, data):
    place = data.draw(st.integers(0, len(text) - 1))
    changed = bytes([*text[:place], text[place] ^ 1, *text[place + 1:]])
    first, second = fingerprint64([text, changed]).tolist()
    assert first != second


def test_the_order_of_a_chain_counts():
    first, second = fingerprint64([b"a", b"b"])[:, None]
    start = np.array([DEFAULT_HASH_KEY], np.uint64)
    assert chain(chain(start, first), second) != chain(chain(start, second), first)


def test_no_words_have_no_fingerprints():
    assert fingerprint64([]).shape == (0,)


@pytest.mark.slow
def test_ids_are_the_same_in_processes_with_other_hash_seeds():
    printed = {subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, cwd=project_files.ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}).stdout for seed in ("1", "2")}
    assert len(printed) == 1
    assert "'city/hash_1000000': [[" in printed.pop()
