"""What a model's summary shows."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from trainer.core.modules import LayerRow, as_functional, render_summary, with_shardings

IMAGES = jax.ShapeDtypeStruct((5, 4, 4, 3), jnp.float32)


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(nn.Dense(2)(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        offset = self.param("offset", nn.initializers.zeros, (4, 4, 3))
        x = nn.Conv(6, (3, 3), name="conv")(x + offset)
        x = nn.BatchNorm(name="norm")(x).reshape(len(x), -1)
        return LinenHead(name="head")(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.offset = nnx.Param(jnp.zeros((4, 4, 3)))
        self.conv = nnx.Conv(3, 6, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.head = nnx.Sequential(nnx.Linear(96, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    def __call__(self, x):
        x = self.norm(self.conv(x + self.offset))
        return self.head(x.reshape(len(x), -1))


CASES = [
    (LinenNet(), [
        LayerRow("", "LinenNet", "(None, 2)", 48, 48),
        LayerRow("conv", "Conv", "(None, 4, 4, 6)", 168, 168),
        LayerRow("norm", "BatchNorm", "(None, 4, 4, 6)", 24, 12),
        LayerRow("head/Dense_0", "Dense", "(None, 2)", 194, 194),
        LayerRow("head/Dropout_0", "Dropout", "(None, 2)", 0, 0),
    ]),
    (NNXNet(nnx.Rngs(0)), [
        LayerRow("", "NNXNet", "(None, 2)", 48, 48),
        LayerRow("conv", "Conv", "(None, 4, 4, 6)", 168, 168),
        LayerRow("norm", "BatchNorm", "(None, 4, 4, 6)", 24, 12),
        LayerRow("head/layers/0", "Linear", "(None, 2)", 194, 194),
        LayerRow("head/layers/1", "Dropout", "(None, 2)", 0, 0),
    ]),
]


@pytest.mark.parametrize(("module", "rows"), CASES)
def test_rows_are_the_layers_that_hold_numbers_or_call_no_other(module, rows):
    assert [row[:5] for row in as_functional(module).summary_rows(IMAGES)] == [row[:5] for row in rows]


@pytest.mark.parametrize("module", [module for module, _ in CASES])
def test_rows_have_the_bytes_and_the_operations_of_their_layers_for_a_row_of_inputs(module):
    own, conv, norm, head, dropout = as_functional(module).summary_rows(IMAGES)
    assert [row.nbytes for row in (own, conv, norm, head, dropout)] == [4 * row.params for row in
                                                                        (own, conv, norm, head, dropout)]
    assert own.flops == 48  # the offset is added
    assert conv.flops == 2 * 3 * 3 * 3 * 6 * 16 + 6 * 16  # products, and the bias
    assert head.flops == 2 * 96 * 2 + 2 and dropout.flops == 0
    assert 3 * 96 < norm.flops < 5 * 96


def test_operations_in_a_loop_count_for_each_iteration():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=5)
            return layer()(x, None)[0]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16, use_bias=False)(x), None

    (row,) = as_functional(Layers()).summary_rows(jnp.zeros((3, 16)))
    assert (row.params, row.flops) == (5 * 256, 5 * 2 * 256)


def test_how_parameters_are_split_is_told_of_their_layer():
    rows = with_shardings([LayerRow("", "Net", "", 8, 8), LayerRow("up", "Dense", "", 72, 72)], {
        "up/kernel": "(None, 'model')", "up/bias": "('model',)", "offset": "('model',)"})
    assert [row.sharding for row in rows] == ["offset ('model',)", "kernel (None, 'model'), bias ('model',)"]
    assert render_summary(rows, "Net", 80, 80, 0)[1].split()[-1] == "Sharding"


@pytest.mark.parametrize("module", [module for module, _ in CASES])
def test_rows_add_up_to_all_parameters_and_state(module):
    functional = as_functional(module)
    params, model_state, _ = jax.eval_shape(functional.init, jax.random.key(0), IMAGES)
    rows = functional.summary_rows(IMAGES)
    assert sum(row.trainable for row in rows) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(row.params for row in rows) == sum(leaf.size for leaf in jax.tree.leaves((params, model_state)))


@pytest.mark.parametrize("module", [module for module, _ in CASES])
def test_a_summary_allocates_nothing_and_leaves_the_module_alone(module):
    functional = as_functional(module)
    functional.summary_rows(IMAGES)
    arrays = len(jax.live_arrays())
    functional.summary_rows(jax.ShapeDtypeStruct((2**20, 4, 4, 3), jnp.float32))
    assert len(jax.live_arrays()) == arrays
    assert type(getattr(module, "norm", None)) in (nnx.BatchNorm, type(None))


def test_a_layer_that_is_called_twice_has_one_row():
    shared = nn.Dense(3)
    assert as_functional([shared, shared]).summary_rows(jnp.zeros((2, 3))) == [
        LayerRow("layers_0", "Dense", "(None, 3)", 12, 12, 48, 2 * (2 * 9 + 3))]


@pytest.mark.slow
def test_the_shapes_of_several_outputs_are_all_shown():
    rows = as_functional([nn.RNN(nn.SimpleCell(4), return_carry=True)]).summary_rows(jnp.zeros((2, 5, 3)))
    nnx_rows = as_functional(nnx.RNN(nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0)))).summary_rows(jnp.zeros((2, 5, 3)))
    assert {row.path for row in rows} == {"layers_0/cell/h", "layers_0/cell/i"}
    assert sum(row.params for row in rows) == 32
    assert {row.path for row in nnx_rows} == {"cell/dense_i", "cell/dense_h"}
    split = as_functional(lambda x: (x, x[0])).summary_rows(jnp.zeros((2, 3)))
    assert [row.output_shape for row in split] == ["(None, 3), (3,)"]


def test_named_modules_are_listed_under_their_names():
    rows = as_functional({"a": nn.Dense(2), "b": [nn.Dense(1)]}).summary_rows({"a": jnp.zeros((2, 3)),
                                                                                "b": jnp.zeros((2, 3))})
    assert [(row.path, row.params) for row in rows] == [("a", 8), ("b/layers_0", 4)]


def test_the_table_groups_thousands_and_counts_state_as_not_trainable():
    row = LayerRow("", "Net", "(None, 10)", 3_538_984, 3_504_872)
    lines = render_summary([row], "Net", total=3_538_984, trainable=3_470_760, state_count=34_112)
    assert lines[-4:] == ["Total params: 3,538,984 (0 B)", "Trainable params: 3,470,760",
                          "Non-trainable params: 68,224", "Model state among these: 34,112"]
    assert lines[0] == "Model: Net"
    assert len({len(line) for line in lines[1:-4]}) == 1
    assert "3,538,984" in lines[3]
    assert "3,504,872" in lines[3]
