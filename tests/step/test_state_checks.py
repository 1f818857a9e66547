"""Model state of a module's own is one device's after a step of several replicas, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.networks import mirrored
from trainer import distribute

rng = np.random.default_rng(0)
X = rng.normal(size=(48, 6)).astype(np.float32)
Y = rng.normal(size=(48, 3)).astype(np.float32)


def fit(module, replicas, rows=48, **options):
    """Returns the model state after two epochs."""
    with mirrored(replicas).scope():
        model = trainer.Model(module)
        model.compile(optax.sgd(0.05), "mse", **options)
    model.fit(X[:rows], Y[:rows], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return jax.tree.leaves(jax.tree.map(np.asarray, model.state.model_state))


class Counting(nn.Module):
    """State of several kinds; `rows` leaves out what pads a batch."""

    kinds: tuple = ("count",)

    @nn.compact
    def __call__(self, x, train: bool = False):
        hidden = nn.Dense(3)(x)
        context = distribute.get_replica_context()
        shapes = {"count": ((3,), jnp.int32), "total": ((6,), jnp.float32), "mean": ((6,), jnp.float32),
                  "largest": ((6,), jnp.float32), "steps": ((), jnp.int32)}
        states = {kind: self.variable("usage", kind, jnp.zeros, *shapes[kind]) for kind in self.kinds}
        if train and not self.is_initializing():
            mask = context.row_mask[:, None]
            updates = {
                "count": lambda old: old + (jax.nn.one_hot(hidden.argmax(-1), 3) * mask).sum(0).astype(jnp.int32),
                "total": lambda old: old + (x * mask).sum(0),
                "mean": lambda old: 0.9 * old + 0.1 * (x * mask).sum(0) / mask.sum(),
                "largest": lambda old: jnp.maximum(old, jnp.where(mask > 0, x, -1e9).max(0)),
                "steps": lambda old: old + 1,
            }
            for kind, state in states.items():
                state.value = updates[kind](state.value)
        return hidden


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "rules"), [
    (("mean", "steps"), {}), (("count", "total"), {"usage/*": "sum"}), (("largest",), {"usage/largest": "max"}),
    (("count", "mean"), {"**/count": "sum"})])
@pytest.mark.parametrize("options", [{"rows": 48}, {"rows": 35}, {"rows": 45}, {"microbatches": 2}])
def test_model_state_is_that_of_one_device(kinds, rules, options):
    if options == {"microbatches": 2} and kinds == ("mean", "steps"):
        options = {**options, "rows": 32}
    one = fit(Counting(kinds), 1, rows=options.get("rows", 48))
    four = fit(Counting(kinds), 4, state_reduction=rules, **options)
    for expected, found in zip(one, four, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


class CountingNNX(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += (x > 0).sum()
        return self.dense(x)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), [
    (lambda: Counting(("count",)), "usage/count"), (lambda: Counting(("total",)), "usage/total"),
    (lambda: Counting(("largest",)), "usage/largest"), (CountingNNX, "count")])
def test_model_state_without_a_sound_rule_is_refused(make, name):
    with pytest.raises(ValueError, match=rf"model state '{name}' is not the same.*state_reduction=.*sum"):
        fit(make(), 4)
    fit(make(), 4, state_reduction={name: "first"})


class Decaying(nn.Module):
    """Keeps a moving average of a sum over rows, as a codebook of VQ-VAE does."""

    @nn.compact
    def __call__(self, x, training: bool = False):
        average = self.variable("codes", "average", jnp.zeros, 6)
        last = self.variable("codes", "last", jnp.zeros, 6)
        if training:
            average.value = 0.9 * average.value + 0.1 * x.sum(0)
            last.value = x[0]
        return nn.Dense(3)(x)


class Keeping(nn.Module):
    """Keeps one value, an update of itself and the rows."""

    update: object
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, training: bool = False):
        kept = self.variable("usage", "kept", jnp.zeros, (), self.dtype)
        if training:
            kept.value = self.update(kept.value, x)
        return nn.Dense(3)(x)


@pytest.mark.slow
@pytest.mark.parametrize("update", [
    lambda kept, x: kept + (x > 100).sum(),  # 0 for all of these rows, on each replica
    lambda kept, x: jnp.maximum(kept, jax.jit(lambda x: (x > 100).astype(int).max())(x))])
def test_a_count_of_what_is_in_rows_is_refused_also_if_it_is_equal_in_the_first_batch(update):
    with pytest.raises(ValueError, match=r"'usage/kept' depends on the values of rows.*state_reduction"):
        fit(Keeping(update, jnp.int32), 4)
    fit(Keeping(update, jnp.int32), 1)
    fit(Keeping(lambda kept, x: kept + 1, jnp.int32), 4)  # steps


@pytest.mark.slow
@pytest.mark.parametrize("summed", [
    lambda count: distribute.get_replica_context().all_reduce("sum", count),
    lambda count: distribute.get_replica_context().all_gather(count[None]).sum()])
def test_a_count_that_the_module_sums_over_replicas_needs_no_rule(summed):
    module = Keeping(lambda kept, x: kept + summed((x > 0).sum()), jnp.int32)
    assert fit(module, 4) == fit(module, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("update", "rules"), [
    (lambda kept, x: 0.9 * kept + 0.1 * x.mean(), {}), (lambda kept, x: 0.9 * kept + 0.1 * x.mean(), {"**": "mean"}),
    (lambda kept, x: kept + len(x), {"**": "sum"})])
def test_state_that_counts_padding_is_refused(update, rules):
    for rows in (48, 33):  # a last batch of 1 row is computed whole
        np.testing.assert_allclose(fit(Keeping(update), 4, rows, state_reduction=rules), fit(Keeping(update), 1, rows),
                                   rtol=1e-4)
    with pytest.raises(ValueError, match=r"'usage/kept' counts rows that only pad.*In the module.*row_mask"):
        fit(Keeping(update), 4, 45, state_reduction=rules)


def test_a_declared_sum_of_what_decays_is_refused():
    with pytest.raises(ValueError, match=r"declares 'codes/average' to be a \"sum\".*decays.*all_reduce"):
        fit(Decaying(), 4, state_reduction={"codes/average": "sum", "codes/last": "first"})


def test_a_rule_for_state_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="`state_reduction` has the pattern 'code/average', which matches none"):
        fit(Decaying(), 1, state_reduction={"code/average": "sum"})


def test_strategy_run_refuses_counts_that_differ():
    strategy, module = mirrored(4), CountingNNX()
    x = next(iter(strategy.experimental_distribute_dataset(trainer.data.Dataset.from_arrays(X).batch(16))))
    with pytest.raises(ValueError, match=r"model state '0/count' is not the same.*strategy\.reduce"):
        strategy.run(lambda module, x: module(x).sum(), args=(module, x))


@pytest.mark.parametrize(("rules", "message"), [
    ({"usage": "average"}, "Unknown state_reduction 'average'"), ("sum", "path patterns to reductions"),
    ({"[": "sum"}, "valid regular expression")])
def test_rules_that_cannot_be_used(rules, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.Model(Counting()).compile("sgd", "mse", state_reduction=rules)
