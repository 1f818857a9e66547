"""How a history looks: its text, its table in notebooks, its curves; and the texts of what trains."""

import sys

import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss
from trainer.callbacks import History
from trainer.callbacks.record import tables

X, Y, _ = classification(24)


@pytest.fixture(scope="module")
def history():
    model = trainer.Model(LinenMLP())
    model.compile("sgd", logits_loss(), metrics=["accuracy"])
    return model.fit(X, Y, batch_size=8, epochs=5, validation_data=(X, Y), validation_freq=[2, 5], verbose=0)


@pytest.mark.slow
def test_values_know_their_epochs(history):
    assert history.epochs_of("loss") == [0, 1, 2, 3, 4] and history.epochs_of("val_accuracy") == [1, 4]
    with pytest.raises(KeyError, match=r"no log 'mse'\. Known logs: 'loss', 'accuracy', 'val_loss', 'val_accuracy'\."):
        history.epochs_of("mse")
    with pytest.raises(KeyError, match="Known logs: none yet"):
        History().epochs_of("loss")
    with pytest.raises(TypeError, match=r"`log` must be text\. Received: a value of type list"):
        history.epochs_of(["loss"])


def test_epochs_are_kept_where_a_run_is_resumed():
    first, second = History(), History()
    for epoch in range(3):
        first.on_epoch_end(epoch, {"loss": 1.0, **({"val_loss": 2.0} if epoch == 1 else {})})
    second.on_train_begin()
    second.load_state_dict(first.state_dict())
    second.on_epoch_end(3, {"loss": 1.0, "val_loss": 2.0})
    assert second.epochs_of("loss") == [0, 1, 2, 3] and second.epochs_of("val_loss") == [1, 3]


def test_values_that_were_assigned_are_of_the_first_epochs():
    history = History()
    history.history = {"loss": [1.0, 2.0], "val_loss": [3.0]}
    history.epoch = [0, 1]
    history.on_epoch_end(2, {"loss": 3.0})
    assert history.epochs_of("loss") == [0, 1, 2] and history.epochs_of("val_loss") == [0]
    assert history.history == {"loss": [1.0, 2.0, 3.0], "val_loss": [3.0]}


def test_the_text_is_a_table(history):
    lines = repr(history).splitlines()
    assert lines[0] == "History of 5 epochs" and len(lines) == 3 + 5
    assert lines[1].split() == ["epoch", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert lines[3].split() == ["1", f"{history.history['loss'][0]:.4g}", f"{history.history['accuracy'][0]:.4g}"]
    assert lines[4].split()[3] == f"{history.history['val_loss'][0]:.4g}"
    assert repr(History()) == "History of 0 epochs"


def test_a_notebook_shows_the_same_cells(history):
    shown = history._repr_html_()
    assert shown.count("<tr>") == 6 and "<th>val_accuracy</th>" in shown
    assert f"<td>{history.history['loss'][-1]:.4g}</td>" in shown
    assert "&lt;b&gt;" in tables.as_html([["<b>"]])


def test_a_long_table_leaves_out_its_middle():
    history = History()
    for epoch in range(100):
        history.on_epoch_end(epoch, {"loss": 1.0})
    rows = history._table()[1:]
    assert len(rows) == tables.MAX_ROWS and rows[3] == ["...", "..."]
    assert [row[0] for row in rows if row[0] != "..."] == ["1", "2", "3", *map(str, range(93, 101))]


def test_a_plot_has_an_axis_for_each_metric_with_both_curves(history):
    figure = history.plot()
    axes = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title() for axis in axes] == ["loss", "accuracy"]
    training, validation = axes[0].get_lines()
    np.testing.assert_allclose(training.get_ydata(), history.history["loss"])
    assert list(validation.get_xdata()) == [2, 5] and list(training.get_xdata()) == [1, 2, 3, 4, 5]
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["training", "validation"]


def test_a_plot_is_a_picture(history, tmp_path):
    history.plot("accuracy").savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_what_cannot_be_plotted_is_said(history, monkeypatch):
    with pytest.raises(ValueError, match=r"(?s)accurcy.*accuracy"):
        history.plot("accurcy")
    with pytest.raises(ValueError, match=r"'val_loss' has no axis of its own: it is drawn with 'loss'"):
        history.plot("val_loss")
    with pytest.raises(ValueError, match=r"Unknown metric 'val_mae'"):
        history.plot("val_mae")
    for metrics in (["loss"], 3):
        with pytest.raises(TypeError, match=r"`metrics` must be names, each an argument of its own"):
            history.plot(metrics)
    with pytest.raises(ValueError, match="has no numbers to plot"):
        History().plot()
    monkeypatch.setitem(sys.modules, "matplotlib.ticker", None)
    with pytest.raises(ImportError, match=r"trainer-jax\[plot\]"):
        history.plot()


def test_models_and_what_they_are_compiled_with_have_texts():
    model = trainer.Model(nn.Dense(3), name="net")
    assert repr(model) == f"Model('net', not built, not compiled, {model.strategy!r})"
    model.compile("sgd", "mse")
    model.build(np.zeros((1, 4)))
    assert repr(model).startswith("Model('net', 15 weights, compiled, Strategy(")
    assert repr(model.optimizer) == "SGD(learning_rate=0.01)"
    assert repr(trainer.optimizers.Adam(0.1, beta_1=0.5)) == "Adam(learning_rate=0.1, beta_1=0.5)"
    assert repr(trainer.optimizers.get(optax.adam(0.1))).startswith("optax(")
    assert repr(trainer.losses.BinaryCrossentropy(from_logits=True)) == "BinaryCrossentropy(from_logits=True)"


def test_optimizers_that_were_written_otherwise_are_equal():
    assert trainer.optimizers.SGD(0.1) == trainer.optimizers.SGD(learning_rate=0.1)
    assert trainer.optimizers.SGD(0.1) != trainer.optimizers.SGD(0.2)
