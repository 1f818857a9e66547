"""Writes optimizers.json: what Keras's optimizers and schedules compute, and what arguments they take.

Run once, in an environment with Keras: `KERAS_BACKEND=jax python tests/reference/make_optimizers.py`.
"""

import inspect
import json
import pathlib

import keras
import numpy as np

STEPS = 10
# Arguments that all optimizers share, each next to one optimizer's own.
COMMON = [{"weight_decay": 0.1}, {"clipnorm": 0.5}, {"clipvalue": 0.2}, {"global_clipnorm": 0.5}]
OWN = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True}, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.01}, {"amsgrad": True, "epsilon": 0.1}],
    "AdamW": [{}, {"weight_decay": 0.1, "amsgrad": True}, {"epsilon": 0.01}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.5, "epsilon": 0.01}],
    "RMSprop": [{}, {"centered": True}, {"centered": True, "momentum": 0.5, "epsilon": 0.1},
                {"rho": 0.8, "momentum": 0.9}],
    "Adadelta": [{}, {"rho": 0.8, "epsilon": 0.01}],
    "Nadam": [{}, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.01}],
    "Adamax": [{}, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.01}],
    "Ftrl": [{}, {"learning_rate_power": -0.8, "initial_accumulator_value": 0.5},
             {"l1_regularization_strength": 0.2, "l2_regularization_strength": 0.1},
             {"l2_shrinkage_regularization_strength": 0.3, "beta": 0.5}],
    "Lion": [{}, {"beta_1": 0.8, "beta_2": 0.9}],
    "Lamb": [{}, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.01}, {"weight_decay": 0.5, "epsilon": 0.01}],
    "Adafactor": [{}, {"beta_2_decay": -0.5, "epsilon_1": 1e-8, "epsilon_2": 0.5, "clip_threshold": 0.5}],
    "Muon": [{}, {"nesterov": False, "momentum": 0.8, "ns_steps": 3, "rms_rate": None},
             {"adam_beta_1": 0.8, "adam_beta_2": 0.9, "epsilon": 0.01, "adam_lr_ratio": 0.1, "adam_weight_decay": 0.1},
             {"exclude_layers": ["ker"], "adam_weight_decay": None, "weight_decay": None},
             {"muon_a": 3.0, "muon_b": -3.2, "muon_c": 1.2}],
    "ScheduleFreeAdamW": [{}, {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 0.01}, {"warmup_steps": 4}],
}
SCHEDULED = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}, "Adam": {"weight_decay": 0.1}}
LEARNING_RATE = 0.1
LEARNING_RATE_SCHEDULE = {"class": "ExponentialDecay", "arguments": {
    "initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5}}

SCHEDULES = {
    "ExponentialDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5},
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5, "staircase": True},
    ],
    "InverseTimeDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5},
        {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5, "staircase": True},
    ],
    "PiecewiseConstantDecay": [
        {"boundaries": [5, 20], "values": [0.1, 0.05, 0.01]},
        {"boundaries": [4.5], "values": [0.1, 0.05]},
    ],
    "PolynomialDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 10},
        {"initial_learning_rate": 0.1, "decay_steps": 10, "end_learning_rate": 0.01, "power": 0.5},
        {"initial_learning_rate": 0.1, "decay_steps": 10, "power": 2.0, "cycle": True},
    ],
    "CosineDecay": [
        {"initial_learning_rate": 0.1, "decay_steps": 20},
        {"initial_learning_rate": 0.1, "decay_steps": 20, "alpha": 0.25},
        {"initial_learning_rate": 0.01, "decay_steps": 20, "alpha": 0.25, "warmup_target": 0.1, "warmup_steps": 5},
        {"initial_learning_rate": 0.01, "decay_steps": 20, "warmup_target": 0.1},
    ],
    "CosineDecayRestarts": [
        {"initial_learning_rate": 0.1, "first_decay_steps": 4},
        {"initial_learning_rate": 0.1, "first_decay_steps": 4, "t_mul": 1.0, "m_mul": 0.5},
        {"initial_learning_rate": 0.1, "first_decay_steps": 4, "t_mul": 1.5, "m_mul": 0.8, "alpha": 0.1},
    ],
}
SCHEDULE_STEPS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 15, 19, 20, 21, 25, 28, 30, 40, 60, 61, 1000]


def problem():
    """Returns the parameters and ten gradients: of very different sizes, with weights that get none."""
    random = np.random.default_rng(0)
    params = {"kernel": random.uniform(0.2, 1.0, (2, 3)), "bias": random.uniform(-1.0, -0.2, (3,)), "zero": np.zeros(2)}
    sizes = {"kernel": [[1.0, 0.1, 1e-3], [2.0, 0.0, 0.5]], "bias": [0.3, 1e-4, 3.0], "zero": [0.2, 0.02]}
    grads = [{name: random.uniform(0.2, 1.0, value.shape) * random.choice([-1.0, 1.0], value.shape) * sizes[name]
              for name, value in params.items()} for _ in range(STEPS)]
    return rounded(params), [rounded(tree) for tree in grads]


def rounded(tree):
    return {name: np.float32(value.round(7)) for name, value in tree.items()}


def listed(tree):
    """Returns the arrays as nested lists, each number with as many digits as float32 has."""
    return {name: np.vectorize(lambda number: float(f"{number:.9g}"))(value).tolist() for name, value in tree.items()}


def weights_after_each_step(optimizer, params, grads):
    variables = {name: keras.Variable(value, name=name) for name, value in params.items()}
    optimizer.build(list(variables.values()))
    for tree in grads:
        optimizer.apply([tree[name] for name in variables])
        yield {name: variable.numpy() for name, variable in variables.items()}


def arguments_of(keras_class):
    """Returns the names and defaults of a class's arguments, in order."""
    parameters = list(inspect.signature(keras_class.__init__).parameters.values())[1:]
    return [[parameter.name, None if parameter.default is parameter.empty else parameter.default]
            for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def optimizer_cases():
    for name, own in OWN.items():
        for arguments in own + [own[-1] | common for common in COMMON]:
            yield name, {"learning_rate": LEARNING_RATE} | arguments
        yield name, {}
    for name, arguments in SCHEDULED.items():
        yield name, {"learning_rate": LEARNING_RATE_SCHEDULE} | arguments


def built(name, arguments):
    if isinstance(arguments.get("learning_rate"), dict):
        schedule = arguments["learning_rate"]
        arguments = arguments | {
            "learning_rate": getattr(keras.optimizers.schedules, schedule["class"])(**schedule["arguments"])}
    return getattr(keras.optimizers, name)(**arguments)


def main():
    params, grads = problem()
    reference = {
        "origin": f"Keras {keras.__version__}, {keras.backend.backend().upper()} backend",
        "params": listed(params),
        "grads": [listed(tree) for tree in grads],
        "optimizers": [
            {"class": name, "arguments": arguments, "weights": [
                listed(weights) for step, weights in
                enumerate(weights_after_each_step(built(name, arguments), params, grads)) if step in (0, STEPS - 1)]}
            for name, arguments in optimizer_cases()],
        "schedule_steps": SCHEDULE_STEPS,
        "schedules": [
            {"class": name, "arguments": arguments, "values": [
                float(getattr(keras.optimizers.schedules, name)(**arguments)(step)) for step in SCHEDULE_STEPS]}
            for name, variants in SCHEDULES.items() for arguments in variants],
        "optimizer_arguments": {name: arguments_of(getattr(keras.optimizers, name)) for name in OWN},
        "schedule_arguments": {name: arguments_of(getattr(keras.optimizers.schedules, name)) for name in SCHEDULES},
    }
    text = json.dumps(reference).replace('{"class"', '\n{"class"')  # one case a line
    pathlib.Path(__file__).with_name("optimizers.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
