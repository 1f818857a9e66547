"""`trainer.report`: the page of a run says what its `run.json`, its model and its data say."""

import base64
import html.parser
import json
import re
import sys

import numpy as np
import pytest
from flax import linen as nn
from sklearn.metrics import confusion_matrix

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss
from trainer.callbacks import Callback, RunRecord
from trainer.core.timing import Timing
from trainer.tools.report import predictions, sections

X, Y, _ = classification(48)


def trained(folder, module=None, loss=None, y=Y, epochs=3, callbacks=(), **options):
    model = trainer.Model(module or LinenMLP(), name="digits <1>")
    model.compile(trainer.optimizers.SGD(0.1), loss or logits_loss(), metrics=["mae"] if loss else ["accuracy"])
    model.fit(X, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[RunRecord(folder), *callbacks], **options)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, trained(folder, validation_data=(X, Y))


@pytest.mark.slow
def test_a_configuration_is_recorded_and_shown(tmp_path):
    trained(tmp_path / "plain", epochs=1)
    assert "config" not in json.loads((tmp_path / "plain" / "run.json").read_text())
    model = trainer.Model(LinenMLP())
    model.compile("sgd", logits_loss())
    model.fit(X, Y, verbose=0, callbacks=[RunRecord(tmp_path, config={"layers": {"width": 8}, "compile": {}})])
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["config"] == {"layers": {"width": 8}, "compile": {}}
    table, = sections.settings_section(record).parts
    assert ["config: layers", "width 8"] in table.rows and not any(row[0] == "config: compile" for row in table.rows)
    with pytest.raises(TypeError, match="`config` must be a dict of plain data"):
        RunRecord(tmp_path, config="width 8")


def test_each_part_of_the_time_has_a_description_and_a_color():
    assert set(sections.TIME_PARTS) == set(Timing().report()) - {"total", "rows_per_sec"}


class Parsed(html.parser.HTMLParser):
    """The texts of a page, its pictures, and whether each tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.pictures, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert not attrs.keys() & {"href", "srcset"}, "a page needs nothing else"
        if tag == "img":
            self.pictures.append(base64.b64decode(attrs["src"].removeprefix("data:image/svg+xml;base64,")))
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)


def page_of(path):
    with open(path, encoding="utf-8") as file:
        return Parsed(file.read())


@pytest.mark.slow
def test_a_page_has_the_run_in_one_file(run):
    folder, model = run
    path = trainer.report(folder)
    assert path == str(folder / "report.html")
    page, record = page_of(path), json.loads((folder / "run.json").read_text())
    assert len(page.pictures) == 2 and all(b"<svg" in picture for picture in page.pictures)
    for shown in ("digits <1>", "finished", "SGD(learning_rate=0.1)", record["versions"]["jax"], repr(model.strategy),
                  f"{record['history']['val_loss'][-1]:.4g}", "Metrics", "Time", "Environment"):
        assert shown in page.text, shown


@pytest.mark.slow
def test_a_page_with_a_model_and_data_has_its_layers_and_what_it_confuses(run, tmp_path):
    folder, model = run
    path = trainer.report(
        folder, tmp_path / "deep" / "page.html", model=model, data=(X, Y), class_names=["a", "b", "<c>"])
    page = page_of(path)
    right = (model.predict(X, verbose=0).argmax(-1) == Y).sum()
    assert f"{right} of 48 rows are right: {right / 48:.2%}." in page.text
    assert {"Dense_0", "Dense_1", "<c>", "recall"} <= set(page.texts) and len(page.pictures) == 3


@pytest.mark.slow
def test_data_may_be_batches(run, tmp_path):
    folder, model = run
    whole = page_of(trainer.report(folder, tmp_path / "a.html", model=model, data=(X, Y)))
    batches = trainer.data.Dataset.from_arrays((X, Y)).batch(20)
    assert page_of(trainer.report(folder, tmp_path / "b.html", model=model, data=batches)).text == whole.text
    assert page_of(trainer.report(folder, tmp_path / "c.html", model=model, data=[(X[:9], Y[:9]), (X[9:], Y[9:])])
                   ).text == whole.text


@pytest.mark.slow
def test_numbers_have_residuals(tmp_path):
    y = X.sum(1, keepdims=True)
    model = trained(tmp_path, nn.Dense(1), "mse", y)
    page = page_of(trainer.report(tmp_path, model=model, data=(X, y)))
    residuals = model.predict(X, verbose=0) - y
    assert f"{np.abs(residuals).mean():.4g}" in page.texts and "R²" in page.texts
    assert f"{model.evaluate(X, y, verbose=0)['mae']:.4g}" in page.texts


@pytest.mark.slow
def test_markdown_has_its_figures_beside_it(run, tmp_path):
    folder, model = run
    path = trainer.report(folder, tmp_path / "page.md", model=model, data=(X, Y), format="markdown")
    text = (tmp_path / "page.md").read_text()
    assert path == str(tmp_path / "page.md") and text.startswith("# digits \\<1\\>\n")
    pictures = re.findall(r"\]\((page_files/\w+\.png)\)", text)
    assert len(pictures) == 3
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    lines = text.splitlines()
    for line in lines:  # each row of a table has as many cells as its heading
        if line.startswith("|---"):
            index, columns = lines.index(line), line.count("|")
            assert all(row.replace("\\|", "").count("|") == columns for row in lines[index - 1:index + 2])


@pytest.mark.slow
def test_the_same_run_gives_the_same_page(run, tmp_path):
    folder, _ = run
    for name in ("a.html", "b.html"):
        trainer.report(folder, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.slow
def test_a_run_that_failed_in_its_first_epoch_has_a_page(tmp_path):
    class Crash(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("out of <luck>")

    with pytest.raises(RuntimeError):
        trained(tmp_path, callbacks=[Crash()])
    page = page_of(trainer.report(tmp_path))
    assert "failed" in page.texts and "RuntimeError: out of <luck>" in page.text


@pytest.mark.slow
def test_a_run_whose_validations_are_rare_has_its_values_at_their_epochs(tmp_path):
    trained(tmp_path, epochs=5, validation_data=(X, Y), validation_freq=2)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["epochs_of"] == {"val_loss": [1, 3], "val_accuracy": [1, 3]}
    table = sections.curves_section(record).parts[-1]
    (row,) = [row for row in table.rows if row[0] == "val_loss"]
    assert {row[3], row[5]} == {"2", "4"}


def test_a_run_with_numbers_that_are_none_has_a_page(tmp_path):
    record = {"format": 1, "epochs": [0, 1], "history": {"loss": [None, 1.0], "other": [None, None]}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert "1" in page_of(trainer.report(tmp_path)).texts


@pytest.mark.parametrize(("labels", "outputs", "loss", "expected"), [
    ([0, 2], [[1, 0, 0], [1, 0, 3]], "", ([0, 2], [0, 2], 3)),
    ([[0], [1]], [[1, 0], [1, 0]], "", ([0, 1], [0, 0], 2)),
    ([0.0, 1.0], [[1, 0], [1, 0]], "SparseCategoricalCrossentropy()", ([0, 1], [0, 0], 2)),
    ([[0.0, 1.0], [1.0, 0.0]], [[1, 0], [1, 0]], "CategoricalCrossentropy()", ([1, 0], [0, 0], 2)),
    ([0.0, 1.0], [[0.4], [0.6]], "BinaryCrossentropy()", ([0, 1], [0, 1], 2)),
    ([0, 1], [0.4, 0.6], "BinaryCrossentropy(from_logits=True)", ([0, 1], [1, 1], 2)),
    ([-1.0, 1.0], [0.4, -0.6], "Hinge()", ([0, 1], [1, 0], 2)),
    ([0, 5], [[1, 0, 0], [1, 0, 3]], "", None),  # no class
    ([0.5, 1.0], [[1, 0], [1, 0]], "", None),
    ([0.5, 1.5], [[1.0], [1.0]], "MeanSquaredError()", None),
    ([[0.5, 0.5], [1.0, 0.0]], [[1, 0], [1, 0]], "", None),
])
def test_which_labels_are_classes(labels, outputs, loss, expected):
    found = predictions.as_classes(np.array(labels), np.array(outputs), loss)
    assert (found is None) == (expected is None)
    if found is not None:
        assert [found[0].tolist(), found[1].tolist(), found[2]] == list(expected)


def test_a_confusion_matrix_is_that_of_scikit_learn():
    labels, predicted = np.random.default_rng(0).integers(0, 7, (2, 500))
    np.testing.assert_array_equal(predictions.confusion_matrix(labels, predicted, 7),
                                  confusion_matrix(labels, predicted))


@pytest.mark.slow
def test_what_cannot_be_compared_is_said(run, tmp_path):
    folder, _ = run
    model = trainer.Model(nn.Dense(5))
    model.build(X)
    with pytest.warns(UserWarning, match=r"differs in name \(received 'Dense', in run\.json 'digits <1>'\) and "
                                         r"parameters \(received 35, in run\.json 83\)"):
        path = trainer.report(folder, tmp_path / "page.html", model=model, data=(X, np.zeros((48, 2))))
    page = page_of(path)
    assert "are neither classes nor numbers to subtract" in page.text


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"format": "pdf"}, ValueError, "`format` must be one of 'html', 'markdown'"),
    ({"data": (X, Y)}, ValueError, "`data` is for a model to predict"),
    ({"model": 3}, TypeError, r"`model` must be a `trainer.Model`"),
    ({"class_names": ["a"]}, ValueError, "`class_names` is for the confusion matrix"),
    ({"class_names": "abc"}, TypeError, r"`class_names` must be a list of names, .*type str"),
    ({"class_names": {"a", "b"}}, TypeError, r"`class_names` must be a list of names, .*type set"),
])
def test_what_cannot_be_used_is_said_at_once(run, options, error, message):
    with pytest.raises(error, match=message):
        trainer.report(run[0], **options)


def test_names_of_another_number_of_classes_are_refused(run):
    with pytest.raises(ValueError, match=r"names of the 3 classes\. Received: 2 names"):
        trainer.report(run[0], model=run[1], data=(X, Y), class_names=["a", "b"])


@pytest.mark.parametrize("data", [(X[:3], Y), [(X[:9], Y[:9]), (X[9:12], Y[9:])]])
def test_other_numbers_of_labels_than_of_rows_are_refused(run, tmp_path, data):
    with pytest.raises(ValueError, match=r"a label for each row\. Received: 3 rows, and (48|39) labels"):
        trainer.report(run[0], tmp_path / "page.html", model=run[1], data=data)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_the_file_may_be_given_and_no_other(run, tmp_path):
    folder, _ = run
    assert trainer.report(folder / "run.json") == str(folder / "report.html")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(NotADirectoryError, match=r"folder of a run, or its run\.json\. Received: .*other\.json"):
        trainer.report(tmp_path / "other.json")


def test_a_folder_without_a_record_says_who_keeps_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no run\.json.*RunRecord"):
        trainer.report(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is malformed"), ("[]", "is not what this version"),
                                               ('{"format": 99}', "is not what this version")])
def test_another_file_of_that_name_is_refused(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        trainer.report(tmp_path)


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_the_extra_is_named(package, run, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"and {package} cannot be imported.*trainer-jax\[plot\]"):
        trainer.report(run[0])
