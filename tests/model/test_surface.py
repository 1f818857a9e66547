"""What a user finds on a model, and a subclass can clash with: Keras's words and few others."""

import copy

import numpy as np
import pytest
from flax import linen as nn

import trainer

PUBLIC = {
    "apply", "build", "built", "compile", "compile_ahead", "compute_loss", "compute_metrics", "compute_penalties",
    "count_params",
    "current_run", "evaluate", "export", "fit", "get_layer", "get_metrics_result", "get_weights", "history",
    "jit_compile", "layers", "load_weights", "loss", "make_rng", "metrics", "metrics_names", "module", "name",
    "non_trainable_variables", "non_trainable_weights", "optimizer", "predict", "predict_iter", "predict_on_batch",
    "predict_step", "reset_metrics",
    "run_eagerly", "sample_inputs", "save", "save_weights", "set_weights", "skip_non_finite", "spike_rule", "state",
    "state_shapes",
    "stop_evaluating", "stop_predicting", "stop_training", "strategy", "summary", "test_on_batch", "test_step",
    "train_on_batch", "train_step", "trainable", "trainable_variables", "trainable_weights", "validate", "variables",
    "weights",
}


def names_of(model):
    return {name for name in dir(model) if not name.startswith("__")}


def test_the_names_of_a_model_are_those_of_users():
    names = names_of(trainer.Model(nn.Dense(1)))
    assert {name for name in names if not name.startswith("_")} == PUBLIC
    assert len(names - PUBLIC) <= 5


@pytest.mark.slow
def test_a_run_leaves_no_other_names():
    model = trainer.Model(nn.Dense(1))
    names = names_of(model)
    model.compile("sgd", "mse")
    x, y = np.ones((8, 2)), np.ones((8, 1))
    model.fit(x, y, validation_data=(x, y), verbose=0)
    model.predict(x, verbose=0)
    assert names_of(model) == names


class Scaled(trainer.Model):
    scale = 1.0

    def compute_loss(self, *arguments, **named):
        return self.scale * super().compute_loss(*arguments, **named)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_after_a_fit_that_failed_trains_with_its_own_loss(copied):
    model = Scaled(nn.Dense(1), seed=0)
    model.compile("sgd", "mse")
    x, y = np.ones((8, 2)), np.ones((8, 1))
    with pytest.raises(ValueError, match="shape"):
        model.fit(x, np.ones((8, 3, 2)), verbose=0)
    other = copied(model)
    other.scale = 100.0
    losses = [each.fit(x, y, verbose=0).history["loss"][0] for each in (other, model)]
    assert losses[0] == pytest.approx(100 * losses[1])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_an_unbuilt_model_has_a_state_and_a_configuration_of_its_own(copied):
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    model.notes = notes = []
    other = copied(model)
    assert (other.notes is notes) == (copied is copy.copy)
    assert other.strategy.process_group is model.strategy.process_group, "which counts the calls of both"
    other.build(np.ones((8, 2)))
    other.compile("adam", "mae")
    assert other.built and not model.built
    assert (model.optimizer.name, other.optimizer.name) == ("sgd", "adam")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    assert [weight.shape for weight in other.get_weights()] == [(1,), (2, 1)]
