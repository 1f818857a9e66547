"""The demo trains well, says so, and draws its curves; so do the other examples, without curves."""

import ast
import gzip
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support import project_files


def command_of(name, *arguments):
    """Returns the command of an example."""
    return [sys.executable, "-u", str(project_files.ROOT / "examples" / name), *map(str, arguments)]


def run(name, folder, *arguments, succeeds=True):
    """Returns how an example ended; it runs in a folder, with the devices of this machine."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command_of(name, *arguments), cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=300, check=succeeds)


def printed_by(name, folder, *arguments):
    """Returns the lines that an example prints."""
    return run(name, folder, *arguments).stdout.splitlines()


def metrics_of(name, folder, *arguments):
    """Returns the metrics that an example prints last."""
    return ast.literal_eval(printed_by(name, folder, *arguments)[-1])


@pytest.mark.slow
def test_the_digits_demo_reaches_its_accuracy_and_writes_its_curves(tmp_path):
    lines = printed_by("digits.py", tmp_path)
    assert lines[0] == "Training on 8 replicas."
    assert ast.literal_eval(lines[-1])["accuracy"] > 0.97
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_a_language_model_is_fine_tuned_killed_and_continued_to_the_same_bits(tmp_path):
    def started(output):  # on eight simulated devices
        command = command_of("finetune_llm.py", "--epochs", 4, "--output", output)
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    def finished(output):
        printed, _ = started(output).communicate(timeout=300)
        return ast.literal_eval(printed.splitlines()[-1])

    whole = finished("whole")
    assert whole["devices"] == 8 and whole["loss"] < whole["first_loss"] - 1
    with started("killed") as process:
        assert process.stdout.readline().startswith("Epoch 1/4")  # a checkpoint follows
        process.kill()
    assert finished("killed")["loss"] == whole["loss"]
    for file in ("adapters.safetensors", "log.csv", "hf/model.safetensors"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.exhaustive
def test_a_vision_transformer_is_fine_tuned(tmp_path):
    metrics = metrics_of("vit_finetune.py", tmp_path)
    assert metrics["val_accuracy"] > 0.8 and metrics["trained_parameters"] < metrics["parameters"] / 3


@pytest.mark.exhaustive
def test_a_small_gpt_learns_to_add(tmp_path):
    assert ast.literal_eval(printed_by("miniature_gpt.py", tmp_path)[-1])["share_of_right_sums"] > 0.8


@pytest.mark.exhaustive
def test_reconstructions_are_nearer_to_the_images_than_their_mean_is(tmp_path):
    metrics = ast.literal_eval(printed_by("vae.py", tmp_path)[-1])
    assert metrics["mse"] < 0.6 * metrics["mse_of_mean_image"]


@pytest.mark.exhaustive
def test_made_digits_have_the_mean_and_the_spread_of_real_ones(tmp_path):
    metrics = ast.literal_eval(printed_by("dcgan.py", tmp_path)[-1])
    assert metrics["difference_of_mean_images"] < 0.15
    assert 0.7 < metrics["spread_of_pixels"] / metrics["spread_of_real_pixels"] < 1.3


def small_mnist():
    """Returns images that a line can tell apart, for training and for testing, in the order of MNIST's files."""
    labels = np.arange(200, dtype=np.uint8) % 10
    images = np.zeros((200, 28, 28), np.uint8)
    images[np.arange(200), 2 * labels] = 255
    return images[:160], labels[:160], images[160:], labels[160:]


def write_npz(path, **arrays):
    with path.open("wb") as file:  # given a path, NumPy would add a suffix
        np.savez(file, **arrays)


def write_idx(folder):
    names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
             "t10k-labels-idx1-ubyte.gz")
    folder.mkdir()
    for name, array in zip(names, small_mnist(), strict=True):
        content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "accuracy"), [
    ("dense", 0.85), pytest.param("cnn", 0.93, marks=pytest.mark.exhaustive)])
def test_mnist_trains_on_digits_that_take_its_place(tmp_path, model, accuracy):
    lines = printed_by("mnist.py", tmp_path, "--model", model)
    assert lines[0].startswith("No --data: scikit-learn's digits")
    assert ast.literal_eval(lines[-1])["accuracy"] > accuracy


@pytest.mark.slow
def test_mnist_reads_the_file_of_keras(tmp_path):
    names = ("x_train", "y_train", "x_test", "y_test")
    write_npz(tmp_path / "mnist.npz", **dict(zip(names, small_mnist(), strict=True)))
    metrics = metrics_of("mnist.py", tmp_path, "--data", "mnist.npz", "--model", "dense", "--epochs", 10)
    assert metrics["rows"] == 160
    assert metrics["accuracy"] == 1


@pytest.mark.slow
def test_mnist_reads_a_folder_of_idx_files(tmp_path):
    write_idx(tmp_path / "mnist")
    metrics = metrics_of("mnist.py", tmp_path, "--data", "mnist", "--model", "dense", "--epochs", 10)
    assert metrics["rows"] == 160
    assert metrics["accuracy"] == 1


def cut_short(folder):
    write_idx(folder)
    path = folder / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(("write", "message"), [
    (lambda path: None, "is not there"),
    (lambda path: path.write_text("no arrays"), "no .npz file of numbers"),
    (lambda path: write_npz(path, x_train=np.zeros(3)), "y_train is not"),
    (lambda path: write_npz(path, x_train=np.array([None])), "no .npz file of numbers"),
    (lambda path: path.mkdir(), "no file train-images-idx3-ubyte"),
    (cut_short, "t10k-images-idx3-ubyte is not whole"),
])
def test_mnist_names_what_is_wrong_with_a_file(tmp_path, write, message):
    write(tmp_path / "data")
    done = run("mnist.py", tmp_path, "--data", "data", succeeds=False)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.exhaustive
def test_texts_are_classified_by_what_they_mean(tmp_path):
    # By its words alone, a text that says "not" would be put into the wrong class: a third of them do.
    assert metrics_of("text_classification.py", tmp_path)["accuracy"] > 0.85


@pytest.mark.exhaustive
def test_a_student_learns_more_from_a_teacher_than_from_labels(tmp_path):
    metrics = metrics_of("distillation.py", tmp_path)
    assert metrics["accuracy_teacher"] > 0.95
    assert metrics["accuracy_distilled"] > metrics["accuracy_alone"] + 0.05


@pytest.mark.exhaustive
def test_pairs_of_digits_tell_which_digits_are_alike(tmp_path):
    metrics = metrics_of("siamese.py", tmp_path)
    assert metrics["accuracy"] > 0.92
    assert metrics["accuracy_of_neighbours"] > 0.93


@pytest.mark.exhaustive
def test_weights_for_some_digits_help_with_others(tmp_path):
    metrics = metrics_of("transfer_learning.py", tmp_path)
    assert metrics["accuracy_of_fine_tuned"] > metrics["accuracy_from_scratch"] + 0.1
    assert metrics["accuracy_of_fine_tuned"] > metrics["accuracy_of_frozen"] > 0.35


@pytest.mark.exhaustive
def test_an_actor_learns_to_balance_a_pole(tmp_path):
    metrics = metrics_of("actor_critic.py", tmp_path)
    assert metrics["return_before"] < 50
    assert metrics["return_after"] > 300


@pytest.mark.exhaustive
def test_lora_adapts_a_transformer_whose_weights_stay_as_they_are(tmp_path):
    metrics = metrics_of("lora.py", tmp_path)
    assert metrics["base_is_unchanged"] is True
    assert metrics["merged_differs_by"] < 1e-4
    assert metrics["bytes_of_adapters"] < 4 * metrics["trained_parameters"] + 5000
    assert metrics["trained_parameters"] < 0.1 * metrics["parameters"]
    assert metrics["loss_after"] < 0.2 * metrics["loss_before"]
    assert metrics["accuracy_before"] < 0.3 and metrics["accuracy_after"] > 0.85
