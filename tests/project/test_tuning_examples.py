"""The examples that search with Optuna and Ray Tune find good networks, and the server answers what `predict` does."""

import asyncio
import importlib.util
import threading

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.project.test_examples import metrics_of
from tests.support import project_files
from tests.support.waiting import LONG_SECS
from trainer.data import preprocessing

FASTAPI = all(importlib.util.find_spec(name) for name in ("fastapi", "httpx2"))
X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


@pytest.mark.exhaustive
def test_optuna_prunes_trials_and_finds_a_good_one(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    metrics = metrics_of("optuna_pruning.py", tmp_path)
    assert metrics["accuracy"] > 0.93
    assert metrics["complete"] + metrics["pruned"] == 10 and metrics["pruned"] >= 1


@pytest.mark.exhaustive
def test_ray_stops_trials_early_and_finds_a_good_one(tmp_path):
    pytest.importorskip("ray.tune", exc_type=ImportError)
    metrics = metrics_of("ray_tune.py", tmp_path)
    assert metrics["accuracy"] > 0.9
    assert metrics["trials"] == 6 and metrics["errors"] == 0 and metrics["stopped_early"] >= 2


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serve():
    if not FASTAPI:
        pytest.skip("FastAPI or httpx2 is not installed")
    spec = importlib.util.spec_from_file_location("serve_fastapi", project_files.ROOT / "examples" / "serve_fastapi.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and its export."""
    path = tmp_path_factory.mktemp("served") / "model.export"
    model = trainer.Model(trainer.models.MLP(num_classes=3, hidden=(4,)))
    model.build(X)
    model.export(path)
    return model, str(path)


@pytest.fixture
def client(serve, exported):
    from fastapi.testclient import TestClient

    with TestClient(serve.make_app(exported[1], max_rows=8, wait_secs=0.05)) as client:
        yield client


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.slow
def test_the_server_is_healthy_and_tells_what_it_takes(client):
    assert client.get("/health").json() == {
        "status": "ok", "inputs": ["rows", 6], "dtype": "float32", "requests": 0, "batches": 0}


@pytest.mark.slow
def test_the_server_answers_what_predict_does(client, exported):
    for rows in (1, 3, 8):
        answer = client.post("/predict", json={"rows": X[:rows].tolist()})
        assert answer.status_code == 200
        np.testing.assert_allclose(answer.json()["outputs"], exported[0].predict(X[:rows], verbose=0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "words"), [
    ([[1.0, 2.0]], "must have the shape"), ([], "must have the shape"), (X[:9].tolist(), "with 1 to 8 rows"),
    ([[1, 2, 3, 4, 5, "six"]], "must be numbers"), ([[1], [1, 2]], "must be numbers")])
def test_rows_that_cannot_be_used_are_refused(client, rows, words):
    answer = client.post("/predict", json={"rows": rows})
    assert answer.status_code == 422 and words in answer.json()["detail"]


class Bag(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(2)(nn.Embed(5, 3)(tokens).mean(1))


@pytest.mark.slow
def test_a_layer_in_a_file_encodes_texts_and_tables(serve, tmp_path):
    from fastapi.testclient import TestClient

    texts = preprocessing.TextVectorization(vocabulary=["good", "bad"], output_sequence_length=4)
    table = preprocessing.FeatureSpace({"size": "float_normalized", "city": "string_categorical"})
    table.adapt({"size": [1.0, 3.0], "city": ["Oslo", "Rome"]})
    for layer, module, rows in ((texts, Bag(), ["Good.", "a bad film"]),
                                (table, nn.Dense(2), {"size": [2.0], "city": ["Rome"]})):
        x = layer(rows)
        model = trainer.Model(module)
        model.build(x)
        model.export(tmp_path / "model.export")
        layer.save(tmp_path / "layer.json")
        app = serve.make_app(str(tmp_path / "model.export"), max_rows=4, layer_path=str(tmp_path / "layer.json"))
        with TestClient(app) as client:
            answer = client.post("/predict", json={"rows": rows})
            assert answer.status_code == 200
            np.testing.assert_allclose(answer.json()["outputs"], model.predict(x, verbose=0), rtol=1e-5)
            answer = client.post("/predict", json={"rows": [[1.0, 2.0]]})
            assert answer.status_code == 422 and f"what {type(layer).__name__} takes" in answer.json()["detail"]


@pytest.mark.slow
def test_requests_at_the_same_time_are_one_batch(serve, exported):
    from fastapi.testclient import TestClient

    expected = exported[0].predict(X[:6], verbose=0)
    answers = [None] * 6

    def ask(number):
        answers[number] = client.post("/predict", json={"rows": X[number:number + 1].tolist()}).json()["outputs"]

    with TestClient(serve.make_app(exported[1], max_rows=6, wait_secs=LONG_SECS)) as client:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        health = client.get("/health").json()
    np.testing.assert_allclose(np.concatenate(answers), expected, rtol=1e-5)
    assert (health["requests"], health["batches"]) == (6, 1)


@pytest.mark.slow
def test_batches_hold_so_many_rows_and_an_error_reaches_all_of_a_batch(serve, exported):
    async def answers(batcher, sizes):
        running = asyncio.create_task(batcher.run())
        found = await asyncio.gather(*(batcher.predict(X[:size]) for size in sizes), return_exceptions=True)
        running.cancel()
        return found

    model, path = exported
    batcher = serve.Batcher(trainer.load_exported(path), max_rows=8, wait_secs=LONG_SECS)
    found = asyncio.run(answers(batcher, (5, 2, 4, 8)))
    assert (batcher.batches, batcher.requests) == (3, 4)
    for size, outputs in zip((5, 2, 4, 8), found, strict=True):
        np.testing.assert_allclose(outputs, model.predict(X[:size], verbose=0), rtol=1e-5)

    def fails(rows):
        raise RuntimeError("out of luck")

    batcher = serve.Batcher(fails, max_rows=8, wait_secs=0.05)
    assert [str(error) for error in asyncio.run(answers(batcher, (1, 2)))] == ["out of luck"] * 2
