"""Modules as Flax's users write them: each row of the table in docs/modules_and_steps.md has a program here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.module_cases import close, key_maker
from tests.support.project_files import ROOT
from trainer.core.modules import CallKwargs, as_functional
from trainer.distribute import MirroredStrategy

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Outputs:
    """Outputs of a module in training and outside of it, each at two steps, and its state after the first."""

    def __init__(self, module, inputs=X, eval_module=None, **call_kwargs):
        functional = as_functional(module, CallKwargs(**call_kwargs), eval_module)
        self.params, self.state, _ = functional.init(jax.random.key(0), inputs)

        def apply(training, step):
            return functional.apply(self.params, self.state, inputs, training=training, make_key=key_maker(step=step))

        (self.train, self.new_state), (self.next_train, _) = apply(True, 0), apply(True, 1)
        (self.test, _), (self.next_test, _) = apply(False, 0), apply(False, 1)

    @property
    def drops(self):
        """Whether it draws in training, other numbers in each step, and not outside of it."""
        return (not np.allclose(self.train, self.next_train) and np.allclose(self.test, self.next_test)
                and not np.allclose(self.train, self.test))

    @property
    def moves(self):
        """Whether training changes the state."""
        return any(not np.allclose(old, new) for old, new in zip(
            jax.tree.leaves(self.state), jax.tree.leaves(self.new_state), strict=True))


def linen(call, **fields):
    """Returns a Linen module with that `__call__`."""
    return type("Net", (nn.Module,), {"__call__": nn.compact(call), "__annotations__": dict.fromkeys(fields, bool),
                                      **fields})()


def nnx_net(call):
    class Net(nnx.Module):
        __call__ = call

        def __init__(self):
            rngs = nnx.Rngs(0)
            self.dense, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.drop, self.own = nnx.Dropout(0.5), nnx.Dropout(0.5, rngs=rngs)

    return Net()


def dropped_out(self, x, deterministic):
    return nn.Dense(3)(nn.Dropout(0.5, deterministic=deterministic)(x))


def normalized(self, x, mode="eval"):
    return nn.BatchNorm(use_running_average=mode == "eval")(nn.Dense(3)(x))


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.norm, self.drop = nnx.BatchNorm(size, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(x))


def several_inputs():
    net = linen(lambda self, image, text=0.0: nn.Dense(3)(image) + text)
    close(Outputs(net, (X, X)).test, Outputs(net, {"image": X, "text": X}).test)


def flags():
    for flag in ("training", "train", "is_training", "is_train", "enable_dropout"):
        scope = {}
        exec(f"def call(self, x, {flag}: bool = False): return dropped_out(self, x, not {flag})",
             {"dropped_out": dropped_out}, scope)
        assert Outputs(linen(scope["call"])).drops, flag
    for flag in ("deterministic", "use_running_average", "inference", "eval"):
        scope = {}
        exec(f"def call(self, x, {flag}=True): return dropped_out(self, x, {flag})",
             {"dropped_out": dropped_out}, scope)
        assert Outputs(linen(scope["call"])).drops, flag
    named_otherwise = Outputs(linen(lambda self, x, train="never": nn.Dense(3)(x) if train == "never" else None))
    close(named_otherwise.train, named_otherwise.test)


def nested_flags():
    assert Outputs(linen(lambda self, x: dropped_out(self, x, None))).drops


def configuration():
    def call(self, x):
        return dropped_out(self, x, self.deterministic)

    net = type("Net", (nn.Module,), {"__call__": nn.compact(call), "__annotations__": {"deterministic": bool},
                                     "deterministic": False})
    assert Outputs(net(), eval_module=net(deterministic=True)).drops


def other_names():
    outputs = Outputs(linen(normalized), train={"mode": "train"}, eval={"mode": "eval"})
    assert outputs.moves
    close(outputs.test, Outputs(linen(normalized), train={}).test)


def make_rng():
    net = linen(lambda self, x: nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), x.shape))
    outputs = Outputs(net)
    assert not np.allclose(outputs.test, outputs.next_test)


def has_rng():
    assert Outputs(linen(lambda self, x: dropped_out(self, x, not self.has_rng("dropout")))).drops


def held_streams():
    assert Outputs(nnx_net(lambda self, x: self.own(self.dense(x)))).drops


def rngs_argument():
    assert Outputs(nnx_net(lambda self, x, rngs: self.drop(self.dense(x), rngs=rngs))).drops
    assert Outputs(nnx_net(lambda self, x, rngs=None: self.dense(x if rngs is None else self.drop(x, rngs=rngs)))).drops
    assert Outputs([nnx_net(lambda self, x: self.dense(x)), nnx.Dropout(0.5)]).drops

    def takes_a_key(self, x, rngs: jax.Array):
        return self.dense(x) + jax.random.normal(rngs, x.shape)

    outputs = Outputs(nnx_net(takes_a_key))
    assert not np.allclose(outputs.train, outputs.next_train)


def keys():
    for name in ("rng", "rngs", "key", "z_rng", "rng_key"):
        scope = {}
        exec(f"def call(self, x, {name}): return nn.Dense(3)(x) + random.normal({name}, x.shape)",
             {"nn": nn, "random": jax.random}, scope)
        outputs = Outputs(linen(scope["call"]))
        assert not np.allclose(outputs.train, outputs.next_train), name
    optional = linen(lambda self, x, z_rng=None: nn.Dense(3)(x) + (
        0.0 if z_rng is None else jax.random.normal(z_rng, x.shape)))
    assert Outputs(optional).drops
    attention = linen(lambda self, query, key, value: nn.Dense(3)(query) + key * value)
    close(Outputs(attention, (X, X, X)).train, Outputs(attention, {"query": X, "key": X, "value": X}).train)


def bridged(net):
    return nnx.bridge.lazy_init(nnx.bridge.ToNNX(net, rngs=nnx.Rngs(0, dropout=1)), jnp.ones((1, 3)))


def to_nnx():
    outputs = Outputs(bridged(Flagged()))
    assert outputs.drops
    assert outputs.moves


def to_linen():
    outputs = Outputs(linen(lambda self, x: nn.Dense(3)(nnx.bridge.to_linen(Block, 3)(x))))
    assert outputs.drops
    assert outputs.moves


def backbone():
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(3)(Flagged()(x, train=False))

    assert not Outputs(Head()).moves


def placed():
    net = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    nnx.update(net, jax.device_put(nnx.state(net), jax.devices()[3]))
    with MirroredStrategy(devices=jax.devices()[:2]).scope():
        model = trainer.Model(net)
    model.build(X)


def refused_batch_norm():
    in_nnx = nnx_net(lambda self, x, mode="eval": self.norm(x, use_running_average=mode == "eval"))
    for net in (linen(normalized), in_nnx, bridged(linen(normalized))):
        with pytest.raises(ValueError, match=r"(?i)In training, BatchNorm '\w+' of \w+ uses running averages that no "
                                             "step moves.*train_kwargs.*eval_module"):
            Outputs(net)
        assert not Outputs(net, train={}).moves


def refused_dropout():
    for net in (linen(lambda self, x: dropped_out(self, x, False)),
                linen(lambda self, x: nn.Dense(3)(x) + jax.random.normal(self.make_rng("dropout"), x.shape)),
                nnx_net(lambda self, x: self.own(x, deterministic=False)),
                nnx_net(lambda self, x, rngs: self.drop(x, deterministic=False, rngs=rngs)),
                linen(lambda self, x: nn.BatchNorm(use_running_average=False)(x))):
        with pytest.raises(ValueError, match=r"Outside of training, .* works as in training.*eval_kwargs.*eval_module"):
            Outputs(net)
        Outputs(net, eval={})


def refused_weights():
    class NoModule:
        kernel = np.ones((3, 3))

        def __call__(self, x):
            return x @ self.kernel

    with pytest.raises(TypeError, match="Flax"):
        as_functional(NoModule())


def refused_writes():
    for make in (nnx.SpectralNorm, nnx.WeightNorm):
        module = make(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="writes to its parameters layer_instance/kernel, as"):
            Outputs(module)
        model = trainer.Model(module)
        close(model.predict(X, verbose=0), module(jnp.asarray(X)))
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="Only the optimizer changes parameters here"):
            model.fit(X, X, verbose=0)
    for transform in (nnx.jit, nnx.remat):  # which write back what they have not changed
        Outputs(nnx_net(lambda self, x, transform=transform: transform(lambda layer, x: layer(x))(self.dense, x)))


class Several(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.Dense(3)(x)
        return {"box": hidden, "score": (nn.Dense(3)(hidden), jnp.square(hidden).mean())}


def trained(make, module, devices, **options):
    with MirroredStrategy(devices=jax.devices()[:devices]).scope():
        model = make(module)
        model.compile(optax.sgd(0.1), **options)
    history = model.fit(X, X, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return history, model.state.params


def several_outputs():
    def picked(self):
        return {"box": nn.Dense(3)(self), "score": nn.Dense(2)(self)}

    module = linen(lambda self, x: picked(x))
    for loss in ({"box": "mse"}, {"box": "mse", "score": None}):
        close(trained(trainer.Model, module, 1, loss=loss), trained(trainer.Model, module, 4, loss=loss))


def scalar_output():
    class Auxiliary(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            outputs, auxiliary = y_pred["score"]
            return super().compute_loss(x, y, outputs, sample_weight) + 0.1 * auxiliary

    class Summed(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return super().compute_loss(x, y, y_pred["box"], sample_weight) + jnp.sum(y_pred["box"])

    close(trained(Auxiliary, Several(), 1, loss="mse"), trained(Auxiliary, Several(), 4, loss="mse"))
    close(trained(Summed, Several(), 1, loss="mse"), trained(Summed, Several(), 4, loss="mse"))


def mixed_rows():
    def centered(mean):
        return linen(lambda self, x: (lambda h: h - mean(h.mean(0)))(nn.Dense(3)(x)))

    def of_all(mean):
        return trainer.distribute.get_replica_context().all_reduce("mean", mean)

    for mean in (lambda mean: mean, of_all):
        close(*(trained(trainer.Model, centered(mean), devices, loss="mse") for devices in (1, 4)))


PROGRAMS = {
    "Several inputs": several_inputs,
    "A flag": flags,
    "A flag left at None in Linen": nested_flags,
    "A flag in the configuration": configuration,
    "An argument of another name": other_names,
    "A Linen stream": make_rng,
    "A Linen stream asked for by `has_rng`": has_rng,
    "NNX streams": held_streams,
    "`rngs` in an NNX call": rngs_argument,
    "A key in a call": keys,
    "Linen in NNX": to_nnx,
    "NNX in Linen": to_linen,
    "Several outputs": several_outputs,
    "A scalar among the outputs": scalar_output,
    "A row computed from other rows": mixed_rows,
    "A part that stays in inference": backbone,
    "An object whose arrays lie on devices": placed,
    "BatchNorm whose averages never move": refused_batch_norm,
    "Dropout outside of training": refused_dropout,
    "An NNX call that writes to parameters": refused_writes,
    "Weights outside of a Flax module": refused_weights,
}


@pytest.mark.sampled
@pytest.mark.parametrize("row", PROGRAMS)
def test_a_row_of_the_documents_table_is_true(row):
    PROGRAMS[row]()


def test_each_row_of_the_documents_table_has_a_program():
    text = (ROOT / "docs" / "modules_and_steps.md").read_text()
    table = text.partition("## What a module may look like")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[1:] == list(PROGRAMS)


# What the check must let pass, and what else is refused.

ALLOWED = {
    "a layer that the user has made to use running averages": lambda: Outputs(
        [nn.Dense(3), nn.BatchNorm(use_running_average=True)]),
    "Monte Carlo dropout by a flag": lambda: Outputs(Flagged(), eval={"train": True}),
    "dropout of rate zero": lambda: Outputs(linen(lambda self, x: nn.Dropout(0.0, deterministic=False)(x))),
    "a flag for inference given in training": lambda: Outputs(Flagged(), train={"train": False}),
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_chosen_is_not_refused(name):
    ALLOWED[name]()


@pytest.mark.parametrize("make", [lambda: linen(normalized), lambda: bridged(linen(normalized)), lambda: nnx_net(
    lambda self, x: self.norm(x, use_running_average=True))])
def test_frozen_layers_may_keep_their_averages(make):
    functional = as_functional(make())
    params, model_state, _ = functional.init(jax.random.key(0), X)
    functional.apply(params, model_state, X, training=True, make_key=key_maker(), is_frozen=lambda path: True)


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: trainer.Model(linen(normalized), train_kwargs={"mod": 1}), ValueError,
     "name in `train_kwargs` 'mod'.*'mode'"),
    (lambda: trainer.Model(nn.Dense(3), eval_kwargs="eval"), TypeError, "`eval_kwargs` must be a dict"),
    (lambda: trainer.Model({"a": nn.Dense(3)}, eval_module=nn.Dense(3)), TypeError, "`eval_module` must be a dict by"),
    (lambda: trainer.Model({"a": nn.Dense(3)}, train_kwargs={"b": {}}), ValueError, "module in `train_kwargs` 'b'"),
    (lambda: trainer.Model(nn.Dense(3), eval_module=nn.Dense(4)).build(X), ValueError, "2 differ: bias, kernel"),
    (lambda: Outputs(linen(lambda self, x, mode="": nn.Dense(3)(x)), {"x": X, "mode": X}, train={"mode": ""}),
     ValueError, "both give mode"),
])
def test_errors_say_what_was_received_and_what_was_expected(make, error, text):
    with pytest.raises(error, match=text):
        make()


class Configured(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=not self.train)(nn.Dense(3)(x))


@pytest.mark.parametrize("train", [False, True])
def test_a_configuration_for_one_phase_is_refused_in_the_other(train):
    with pytest.raises(ValueError, match="uses running averages" if not train else "works as in training"):
        Outputs(Configured(train))
    assert Outputs(Configured(train=True), eval_module=Configured()).moves


def test_named_modules_have_arguments_and_modules_to_evaluate_by_name():
    functional = as_functional({"a": linen(normalized), "b": nn.Dropout(0.5, deterministic=False)},
                               CallKwargs({"a": {"mode": "train"}}), {"b": nn.Dropout(0.5, deterministic=True)})
    params, model_state, _ = functional.init(jax.random.key(0), {"a": X, "b": X})
    assert "batch_stats" in model_state["a"]
    outputs, _ = functional.apply(
        params["b"], model_state, X, training=False, make_key=key_maker(), module="b")
    close(outputs, X)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: bridged(Flagged()), lambda: linen(
    lambda self, x: nn.Dense(3)(nnx.bridge.to_linen(Block, 3)(x)))], ids=["ToNNX", "ToLinen"])
def test_batch_norm_in_a_bridge_is_the_same_on_any_number_of_devices(make):
    def state(devices):
        with MirroredStrategy(devices=jax.devices()[:devices]).scope():
            model = trainer.Model(make())
            model.compile(optax.sgd(0.0), "mse")
        model.fit(X[:6], X[:6], batch_size=6, shuffle=False, verbose=0)
        return model.state.model_state

    close(state(1), state(4))


@pytest.mark.slow
def test_a_bridged_module_is_rematerialised_and_summarised():
    functional = as_functional(bridged(Flagged()))
    params, model_state, _ = functional.init(jax.random.key(0), X)
    plain, again = (functional.apply(params, model_state, X, training=True, make_key=key_maker(), remat=remat)
                    for remat in (False, True))
    close(plain, again)
    assert sum(row.trainable for row in functional.summary_rows(X)) == 18
