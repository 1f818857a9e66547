"""Networks of named blocks, in Linen and in NNX, for generated training programs.

Many blocks compute a row from other rows: of these a replica that saw its own rows alone would make another number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax

from tests.support.strategy_cases import waves

WIDTH, VOCABULARY, STEPS_OF_TIME = 8, 11, 4
FEATURES = {"rows": 6, "series": 3}


# --- blocks without weights: functions of an array whose first axis is the rows ---------------------------------------


def spread(h):
    """Adds a batch's standard deviation, as StyleGAN's discriminator sees it."""
    return h + jnp.sqrt(h.var(0) + 0.01).mean()


def contrast(h):
    return h + nn.softmax(h, 0)


def capacity(h):
    """Drops the rows beyond the capacity of the expert that each has chosen, in their order."""
    chosen = jax.nn.one_hot(h[..., :2].argmax(-1), 2)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1)
    return h * (place <= 2)[..., None]


def permuted(h):
    return h + 0.5 * h[np.random.default_rng(len(h)).permutation(len(h))]


def by_rank(h):
    """Adds to each row the next in the order of their values."""
    return h + 0.3 * h[jnp.argsort(h.reshape(len(h), -1)[:, 0])]


def row_attention(h):
    flat = h.reshape(len(h), -1)
    return h + (nn.softmax(flat @ flat.T / WIDTH) @ flat).reshape(h.shape)


def running_mean(h):
    counts = 1 + jnp.arange(len(h)).reshape(-1, *[1] * (h.ndim - 1))
    return jnp.cumsum(h, 0) / counts


def scan_over_rows(h):
    def step(carry, row):
        carry = 0.5 * carry + row
        return carry, jnp.tanh(carry)

    return lax.scan(step, jnp.zeros_like(h[0]), h)[1]


def segments(h):
    """Adds to each row the sum of the rows of its kind."""
    kind = (h.reshape(len(h), -1)[:, 0] > 0).astype(jnp.int32)
    return h + 0.1 * jax.ops.segment_sum(h, kind, 2)[kind]


def best_rows(h):
    _, best = lax.top_k(h.reshape(len(h), -1).sum(-1), min(2, len(h)))
    return h + 0.2 * h[best].mean(0)


def written_row(h):
    return h.at[-1].add(1.0).at[len(h) // 2].multiply(0.5)


def whitened(h):
    flat = h.reshape(-1, h.shape[-1])
    covariance = flat.T @ flat / len(flat) + jnp.eye(h.shape[-1])
    return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(covariance), flat.T, lower=True).T.reshape(h.shape)


def spectrum(h):
    return h + 0.2 * jnp.abs(jnp.fft.fft(h, axis=0) + 2.0)


def pooled(h):
    """Adds to each row the largest of itself and its neighbours."""
    window = (3, *[1] * (h.ndim - 1))
    return h + 0.3 * lax.reduce_window(h, -jnp.inf, lax.max, window, [1] * h.ndim, "SAME")


def every_other(h):
    """Adds to all rows the convolution of every other row and its neighbours."""
    kernel = jnp.cos(jnp.arange(3 * WIDTH * WIDTH).reshape(3, WIDTH, WIDTH)) / WIDTH
    flat = h.reshape(len(h), -1, WIDTH).swapaxes(0, 1)
    convolved = lax.conv_general_dilated(flat, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return h + convolved.repeat(2, 1)[:, :len(h)].swapaxes(0, 1).reshape(h.shape)


def branch(h):
    """Takes a branch by a number of the batch; a mean would be zero but for rounding behind BatchNorm."""
    return lax.cond(jnp.sin(9 * jnp.square(h).mean()) > 0, lambda h: 0.5 * h, jnp.tanh, h)


def halved_until_small(h):
    """Has as many iterations as the batch's values ask for."""
    values = lax.stop_gradient(h)
    return h * lax.while_loop(lambda factor: jnp.square(factor * values).mean() > 0.1, lambda factor: 0.7 * factor, 1.0)


@jax.custom_gradient
def of_unit_gradient(h):
    """Trains the layers before it by gradients of unit length for the batch."""
    return h, lambda grads: (grads / jnp.sqrt(jnp.square(grads).sum() + 1e-4),)


def by_count(h):
    """Does another thing with few rows, as a replica has them."""
    scale, shift = (0.5, jnp.sin(h)) if len(h) < 6 else (1.0, jnp.cos(h))
    return h * jnp.full((len(h), *[1] * (h.ndim - 1)), scale) + 0.1 * shift


def reduced(h):
    """Subtracts a reduction of all rows by a custom function."""
    values = lax.stop_gradient(h)
    return h - lax.reduce(values, np.float32(-np.inf), lambda one, other: jnp.logaddexp(one, other), (0,))


MIXING = {
    "spread": spread, "centered": lambda h: h - h.mean(0), "contrast": contrast, "capacity": capacity,
    "permuted": permuted, "by_rank": by_rank, "neighbours": lambda h: h - 0.5 * jnp.roll(h, 1, 0),
    "sorted": lambda h: jnp.sort(h, 0), "row_attention": row_attention, "running_mean": running_mean,
    "scan_over_rows": scan_over_rows, "segments": segments, "best_rows": best_rows, "written_row": written_row,
    "median": lambda h: h - jnp.median(h, 0), "whitened": whitened, "spectrum": spectrum, "pooled": pooled,
    "every_other": every_other,
    "scaled_by_norm": lambda h: h * jnp.minimum(1.0, 2.0 / jnp.sqrt(jnp.square(h).sum() + 0.01)), "branch": branch,
    "halved_until_small": halved_until_small,
}
WHOLE = {"of_unit_gradient": of_unit_gradient, "by_count": by_count, "reduced": reduced}
ROWWISE = {
    "tanh": jnp.tanh, "mapped": lambda h: lax.map(jnp.tanh, h), "shifted_features": lambda h: jnp.roll(h, 1, -1) + h,
    "recomputed": jax.checkpoint(lambda h: jnp.tanh(h) * h), "sorted_features": lambda h: jnp.sort(h, -1),
}
FUNCTIONS = MIXING | WHOLE | ROWWISE


# --- Linen -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, h, training):
        return nn.tanh(nn.Dense(WIDTH, kernel_init=waves)(h))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, h, training):
        return nn.LayerNorm(epsilon=0.01)(h)


class BatchNormalized(nn.Module):
    """Its epsilon is large: with the usual epsilon, few rows magnify rounding a thousandfold."""

    @nn.compact
    def __call__(self, h, training):
        return nn.BatchNorm(use_running_average=not training, momentum=0.9, epsilon=0.1)(h)


class Dropped(nn.Module):
    axes: tuple = ()

    @nn.compact
    def __call__(self, h, training):
        return nn.Dropout(0.3, broadcast_dims=self.axes)(h, deterministic=not training)


def noise(h, key):
    return h + 0.1 * jax.random.normal(key, h.shape)


def mixed_with_any(h, key):
    """Adds to each row another that is drawn by lot."""
    return h + 0.3 * jax.random.permutation(key, h)


class Random(nn.Module):
    function: object

    @nn.compact
    def __call__(self, h, training):
        return self.function(h, self.make_rng("noise")) if training else h


def tally(h, rows, total, largest):
    """Returns three values of state after a batch: a count, a sum and a maximum."""
    h = lax.stop_gradient(h)
    return rows + jnp.int32(len(h)), total + jnp.abs(h).sum(), jnp.maximum(largest, h.max())


class Tally(nn.Module):
    @nn.compact
    def __call__(self, h, training):
        variables = [self.variable("tally", name, lambda dtype=dtype: jnp.zeros((), dtype))
                     for name, dtype in (("rows", jnp.int32), ("total", jnp.float32), ("largest", jnp.float32))]
        if training and not self.is_initializing():
            values = tally(h, *[variable.value for variable in variables])
            for variable, value in zip(variables, values, strict=True):
                variable.value = value
        return h / (1.0 + variables[2].value)


class Usage(nn.Module):
    """An average of its own, over the rows and over the steps."""

    @nn.compact
    def __call__(self, h, training):
        usage = self.variable("usage", "mean", jnp.zeros, (WIDTH,))
        if training and not self.is_initializing():
            usage.value = 0.9 * usage.value + 0.1 * lax.stop_gradient(h).reshape(-1, WIDTH).mean(0)
        return h - usage.value


class Sown(nn.Module):
    """Adds to the loss how unevenly the batch uses the features, as a mixture of experts does."""

    @nn.compact
    def __call__(self, h, training):
        shares = nn.softmax(h).reshape(-1, WIDTH).mean(0)
        self.sow("losses", "balance", 0.1 * jnp.square(shares).sum())
        return h


class ScannedLayers(nn.Module):
    """Two layers whose weights are stacked."""

    @nn.compact
    def __call__(self, h, training):
        scanned = nn.scan(_Inner, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scanned()(h, None)[0]


class _Inner(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return h + nn.tanh(nn.Dense(WIDTH, kernel_init=waves)(h)), None


LINEN = {
    "layer": Layer, "layer_norm": Normalized, "batch_norm": BatchNormalized, "dropout": Dropped,
    "dropped_rows": lambda: Dropped((-1,)), "noise": lambda: Random(noise),
    "mixed_with_any": lambda: Random(mixed_with_any), "tally": Tally, "usage": Usage, "sown": Sown,
    "scanned_layers": ScannedLayers,
}


class _Cell(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(WIDTH, kernel_init=waves)(jnp.concatenate([carry, x], -1)))
        return carry, carry


class Series(nn.Module):
    """The last state of a recurrence over time, written in one of three ways."""

    way: str

    @nn.compact
    def __call__(self, x):
        if self.way == "rnn":
            return nn.RNN(nn.GRUCell(WIDTH, kernel_init=waves, recurrent_kernel_init=waves))(x)[:, -1]
        start = jnp.zeros((len(x), WIDTH))
        if self.way == "nn_scan":
            scanned = nn.scan(_Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
            return scanned()(start, x)[0]
        weights = self.param("weights", waves, (WIDTH + x.shape[-1], WIDTH))
        return scanned_over_time(weights, start, x)


def scanned_over_time(weights, start, x):
    def step(carry, x):
        return jnp.tanh(jnp.concatenate([carry, x], -1) @ weights), None

    return lax.scan(step, start, x.swapaxes(0, 1))[0]


class LinenNet(nn.Module):
    inputs: str
    blocks: tuple
    outputs: int

    @nn.compact
    def __call__(self, x, training=False):
        if self.inputs == "tokens":
            h = nn.Embed(VOCABULARY, WIDTH, embedding_init=waves, name="first")(x)
        elif self.inputs == "rows":
            h = nn.Dense(WIDTH, kernel_init=waves, name="first")(x)
        else:
            h = Series(self.inputs, name="first")(x)
        for block in self.blocks:
            h = FUNCTIONS[block](h) if block in FUNCTIONS else LINEN[block]()(h, training)
        return nn.Dense(self.outputs, kernel_init=waves, name="last")(h)


# --- NNX -------------------------------------------------------------------------------------------------------------


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, kernel_init=waves, rngs=rngs)

    def __call__(self, h):
        return nnx.tanh(self.dense(h))


class NNXRandom(nnx.Module):
    def __init__(self, function, rngs):
        self.function, self.rngs, self.deterministic = function, rngs.fork(), False

    def __call__(self, h):
        return h if self.deterministic else self.function(h, self.rngs.noise())


class Tallied(nnx.Variable):
    pass


class NNXTally(nnx.Module):
    def __init__(self, rngs):
        self.rows, self.total, self.largest = (Tallied(jnp.zeros((), dtype)) for dtype in (
            jnp.int32, jnp.float32, jnp.float32))
        self.deterministic = False

    def __call__(self, h):
        variables = (self.rows, self.total, self.largest)
        if not self.deterministic:
            for variable, value in zip(variables, tally(h, *[one[...] for one in variables]), strict=True):
                variable[...] = value
        return h / (1.0 + self.largest[...])


class NNXUsage(nnx.Module):
    def __init__(self, rngs):
        self.usage, self.deterministic = Tallied(jnp.zeros(WIDTH)), False

    def __call__(self, h):
        if not self.deterministic:
            self.usage[...] = 0.9 * self.usage[...] + 0.1 * lax.stop_gradient(h).reshape(-1, WIDTH).mean(0)
        return h - self.usage[...]


class Loss(nnx.Variable):
    pass


class NNXSown(nnx.Module):
    def __init__(self, rngs):
        pass

    def __call__(self, h):
        shares = nnx.softmax(h).reshape(-1, WIDTH).mean(0)
        self.sow(Loss, "balance", 0.1 * jnp.square(shares).sum())
        return h


class NNXScannedLayers(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return NNXLayer(rngs)

        self.layers = make(rngs)

    def __call__(self, h):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, h):
            return h + layer(h)

        return run(self.layers, h)


NNX = {
    "layer": NNXLayer, "layer_norm": lambda rngs: nnx.LayerNorm(WIDTH, epsilon=0.01, rngs=rngs),
    "batch_norm": lambda rngs: nnx.BatchNorm(WIDTH, momentum=0.9, epsilon=0.1, rngs=rngs),
    "dropout": lambda rngs: nnx.Dropout(0.3, rngs=rngs),
    "dropped_rows": lambda rngs: nnx.Dropout(0.3, broadcast_dims=(-1,), rngs=rngs),
    "noise": lambda rngs: NNXRandom(noise, rngs), "mixed_with_any": lambda rngs: NNXRandom(mixed_with_any, rngs),
    "tally": NNXTally, "usage": NNXUsage, "sown": NNXSown, "scanned_layers": NNXScannedLayers,
}
BLOCKS = (*FUNCTIONS, *LINEN)


class NNXSeries(nnx.Module):
    def __init__(self, way, rngs):
        self.way = way
        if way == "rnn":
            self.rnn = nnx.RNN(nnx.GRUCell(FEATURES["series"], WIDTH, kernel_init=waves, recurrent_kernel_init=waves,
                                           rngs=rngs))
        else:
            self.weights = nnx.Param(waves(None, (WIDTH + FEATURES["series"], WIDTH)))

    def __call__(self, x):
        if self.way == "rnn":
            return self.rnn(x)[:, -1]
        start = jnp.zeros((len(x), WIDTH))
        if self.way == "lax_scan":
            return scanned_over_time(self.weights[...], start, x)

        @nnx.scan(in_axes=(nnx.Carry, 1), out_axes=nnx.Carry)
        def run(carry, x):
            return jnp.tanh(jnp.concatenate([carry, x], -1) @ self.weights[...])

        return run(start, x)


class NNXNet(nnx.Module):
    def __init__(self, inputs, blocks, outputs):
        rngs = nnx.Rngs(0)
        if inputs == "tokens":
            self.first = nnx.Embed(VOCABULARY, WIDTH, embedding_init=waves, rngs=rngs)
        elif inputs == "rows":
            self.first = nnx.Linear(FEATURES["rows"], WIDTH, kernel_init=waves, rngs=rngs)
        else:
            self.first = NNXSeries(inputs, rngs)
        self.blocks = nnx.List([FUNCTIONS[block] if block in FUNCTIONS else NNX[block](rngs) for block in blocks])
        self.last = nnx.Linear(WIDTH, outputs, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


NETS = {"linen": LinenNet, "nnx": NNXNet}
