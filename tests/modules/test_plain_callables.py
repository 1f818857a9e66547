"""Callables that are no Flax modules: functions are layers without weights, what holds weights is refused."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer.core.modules import as_functional

KERNEL = np.ones((3, 3), np.float32)


class OfItsClass:
    kernel = KERNEL

    def __call__(self, x):
        return x @ self.kernel

    def method(self, x):
        return x @ self.kernel


class OfTheObject:
    def __init__(self, held):
        self.held = held

    def __call__(self, x):
        return x


class Slots:
    __slots__ = ("kernel",)

    def __init__(self):
        self.kernel = jnp.asarray(KERNEL)

    def __call__(self, x):
        return x @ self.kernel


@jax.tree_util.register_dataclass
@dataclass
class Tree:
    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


class OfAnotherLibrary:
    """Like a layer that makes its weights at its first call."""

    @property
    def trainable_variables(self):
        return []

    def __call__(self, x):
        return x


REFUSED = {
    "an array of the class": (OfItsClass, "an array in `kernel`"),
    "an array of the object": (lambda: OfTheObject(KERNEL), "an array in `held`"),
    "arrays in a list of objects": (lambda: OfTheObject([len, OfTheObject(KERNEL)]), r"an array in `held\[1\].held`"),
    "an array in a slot": (Slots, "an array in `kernel`"),
    "a tree of arrays": (lambda: Tree(jnp.asarray(KERNEL)), "an array in `kernel`"),
    "a Linen module inside": (lambda: OfTheObject(nn.Dense(3)), "a Flax module in `held`"),
    "a method": (lambda: OfItsClass().method, "an array in `kernel`"),
    "a method of a module": (lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0)).__call__, "a Flax module"),
    "a partial application": (lambda: functools.partial(OfItsClass(), 1), "an array in `kernel`"),
    "compiled": (lambda: jax.jit(OfItsClass()), "an array in `kernel`"),
    "a layer of another library": (OfAnotherLibrary, "`trainable_variables`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_callable_that_holds_weights_is_refused(name):
    make, held = REFUSED[name]
    with pytest.raises(TypeError, match=f"`module` must be a Flax module.*holds {held}.* not be trained"):
        trainer.Model(make())
    with pytest.raises(TypeError, match=f"Layer 1 must be a Flax module.*holds {held}"):
        trainer.Sequential([nn.Dense(3), make()])


@dataclass
class Scaled:
    factor: float

    def __call__(self, x):
        return self.factor * x


@pytest.mark.parametrize("function", [
    nn.relu, jax.nn.gelu, jnp.tanh, jnp.add, np.tanh, abs, jax.jit(lambda x: x), jax.checkpoint(jnp.sin), Scaled(2.0),
    lambda x: x @ KERNEL, functools.partial(jnp.add, KERNEL), functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
    Scaled(2.0).__call__, jax.vmap(jnp.sin), jax.custom_jvp(lambda x: x),
], ids=lambda function: type(function).__name__)
def test_functions_are_layers_without_weights(function):
    assert not as_functional(function).names
    assert trainer.Sequential([nn.Dense(3), function])


class BareArrays(nnx.Module):
    def __init__(self):
        self.kernel = jnp.asarray(KERNEL)

    def __call__(self, x):
        return x @ self.kernel


def test_an_nnx_module_all_of_whose_weights_are_bare_arrays_is_refused():
    with pytest.raises(TypeError, match=r"BareArrays has no `nnx\.Param`.*bare arrays in kernel.*nnx\.Param\(array\)"):
        trainer.Model(BareArrays())
    constant = BareArrays()
    assert trainer.Model(lambda x: constant(x)).predict(KERNEL, verbose=0).shape == (3, 3)
    beside = trainer.Sequential([BareArrays(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))])  # NNX trains `nnx.Param`s alone
    beside.compile("sgd", "mse")
    beside.fit(KERNEL, KERNEL, verbose=0)
    (kernel,) = jax.tree.leaves(beside.state.model_state)
    assert np.array_equal(kernel, KERNEL)
