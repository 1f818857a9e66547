"""TensorBoard at work in a real fit; what it writes when is tested elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.event_files import read_events, scalars
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer.callbacks import BackupAndRestore, Callback, LambdaCallback, TensorBoard


def make_model(network=None, replicas=1):
    with mirrored(replicas).scope():
        model = trainer.Model(network or LinenMLP(), seed=1)
        model.compile("sgd", logits_loss(), metrics=["accuracy"], steps_per_execution=4)
    return model


@pytest.mark.slow
def test_a_fit_writes_its_history(tmp_path):
    x, y, _ = classification(32)
    board = TensorBoard(tmp_path)
    model = make_model(replicas=2)
    history = model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), callbacks=[board], verbose=0).history
    points = scalars(tmp_path)
    assert points.keys() == {
        "train/epoch_loss", "train/epoch_accuracy", "train/epoch_learning_rate", "validation/epoch_loss",
        "validation/epoch_accuracy", "validation/evaluation_loss_vs_iterations",
        "validation/evaluation_accuracy_vs_iterations"}
    for tag, log in (("train/epoch_loss", "loss"), ("validation/epoch_accuracy", "val_accuracy")):
        assert points[tag] == [(epoch, np.float32(value)) for epoch, value in enumerate(history[log])]
    losses = [np.float32(value) for value in history["val_loss"]]
    assert points["validation/evaluation_loss_vs_iterations"] == list(zip([4, 8], losses, strict=True))
    assert points["train/epoch_learning_rate"] == [(0, np.float32(0.01)), (1, np.float32(0.01))]


@pytest.mark.slow
def test_by_default_steps_stay_fused(tmp_path):
    executions = []
    x, y, _ = classification(32)
    board = TensorBoard(tmp_path, histogram_freq=1)
    counter = LambdaCallback()
    counter.on_execution_end = lambda phase, batch, logs: executions.append(batch)
    make_model().fit(x, y, batch_size=4, epochs=2, callbacks=[board, counter], verbose=0)
    assert executions == [3, 7, 3, 7]



@pytest.mark.slow
def test_every_batch_of_fused_steps_can_be_written(tmp_path):
    x, y, _ = classification(24)
    seen = []
    watcher = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(np.float32(logs["loss"])))
    board = TensorBoard(tmp_path, update_freq="batch")
    make_model().fit(x, y, batch_size=8, epochs=2, callbacks=[watcher, board], verbose=0)
    assert scalars(tmp_path)["train/batch_loss"] == list(enumerate(seen, start=1))


@pytest.mark.slow
def test_what_a_checkpoint_covers_is_on_the_disk_before_it(tmp_path):
    class OnTheDisk(Callback):
        def on_save_point(self, point):
            if point.kind == "batches":
                written.append((point.batches, max(step for step, _ in scalars(tmp_path / "logs")["train/batch_loss"])))

    x, y, _ = classification(24)
    written = []
    callbacks = [BackupAndRestore(tmp_path / "backup", 1), OnTheDisk(), TensorBoard(tmp_path / "logs", update_freq=1)]
    make_model().fit(x, y, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    assert written == [(batch, batch) for batch in range(1, 7)]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("network", "weight", "statistic"), [
    (LinenMLP(batch_norm=True), "Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
    (NNXMLP(batch_norm=True), "first/kernel", "norm/mean"),
], ids=["linen", "nnx"])
def test_histograms_have_the_names_of_the_weights(network, weight, statistic, tmp_path):
    x, y, _ = classification(8)
    model = make_model(network)
    model.fit(x, y, callbacks=[TensorBoard(tmp_path, histogram_freq=1)], verbose=0)
    counts = {tag: sum(row[2] for row in value)
              for _, tag, plugin, _, value in read_events(tmp_path) if plugin == "histograms"}
    assert len(counts) == len(model.get_weights())
    assert counts[f"{weight}/histogram"] == 6 * 8
    assert counts[f"{statistic}/histogram"] == 8


@pytest.mark.slow
def test_an_evaluation_on_its_own_is_written_at_the_number_of_updates(tmp_path):
    x, y, _ = classification(16)
    model = make_model()
    model.fit(x, y, batch_size=4, verbose=0)
    board = TensorBoard(tmp_path)  # held, because one that is dropped closes its file in any case
    logs = model.evaluate(x, y, callbacks=[board], verbose=0)
    assert scalars(tmp_path) == {f"validation/evaluation_{name}_vs_iterations": [(4, np.float32(value))]
                                 for name, value in logs.items()}


def test_a_fit_after_one_that_failed_writes_to_a_new_file(tmp_path):
    x, y, _ = classification(16)
    board = TensorBoard(tmp_path, update_freq=1)
    model = make_model()

    class Fails(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(x, y, batch_size=8, callbacks=[board, Fails()], verbose=0)
    model.fit(x, y, batch_size=8, callbacks=[board], verbose=0)
    assert [step for step, _ in scalars(tmp_path)["train/batch_loss"]] == [1, 1, 2]


@pytest.mark.slow
def test_a_profile_of_a_fit_is_where_tensorboard_looks(tmp_path):
    x, y, _ = classification(32)
    make_model().fit(x, y, batch_size=8, callbacks=[TensorBoard(tmp_path, profile_batch=2)], verbose=0)
    assert len(list(tmp_path.glob("train/plugins/profile/*/*.xplane.pb"))) == 1


class Words(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Embed(5, 2)(x).mean(axis=1))


@pytest.mark.slow
def test_embeddings_are_written_for_the_projector(tmp_path):
    x, y = np.arange(8).reshape(4, 2) % 5, np.array([0, 1, 2, 0])
    model = make_model(Words())
    board = TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata={"Embed_0": "words.tsv"})
    model.fit(x, y, callbacks=[board], verbose=0)
    written = np.loadtxt(tmp_path / "train/embeddings/Embed_0.tsv", delimiter="\t")
    np.testing.assert_allclose(written, model.state.params["Embed_0"]["embedding"], rtol=1e-6)
    assert (tmp_path / "projector_config.pbtxt").read_text().split() == [
        "embeddings", "{", "tensor_name:", '"Embed_0"', "tensor_path:", '"train/embeddings/Embed_0.tsv"',
        "metadata_path:", '"words.tsv"', "}"]


def test_metadata_of_an_unknown_embedding_is_refused_before_the_first_batch(tmp_path):
    x, y = np.zeros((4, 2), int), np.zeros(4, int)
    model = make_model(Words())
    board = TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata={"Embed_1": "words.tsv"})
    with pytest.raises(ValueError, match=r"Unrecognized embedding names in `embeddings_metadata`: \['Embed_1'\]. The "
                                         r"model's embeddings: \['Embed_0'\]"):
        model.fit(x, y, callbacks=[board], verbose=0)
    assert int(model.state.step) == 0
