"""`backup_workers`: an update is that of the parts of a batch that came first, and nobody waits for the others."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.inline_cluster import InlineEngine, InlineHandle, lose_current
from trainer import callbacks, distribute
from trainer.core.rng import stream_key
from trainer.distribute.experimental import partitioners
from trainer.distribute.parameter_server import strategy as strategy_module
from trainer.distribute.parameter_server.rounds import BatchPart
from trainer.distribute.parameter_server.server import ParameterServer, Push, Version

rng = np.random.default_rng(0)
x = rng.normal(size=(40, 6)).astype(np.float32)
y = (x @ rng.normal(size=(6, 3))).argmax(-1)
weights = rng.uniform(0.1, 3.0, size=40).astype(np.float32)
Crossentropy = functools.partial(trainer.losses.SparseCategoricalCrossentropy, from_logits=True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.relu(nn.BatchNorm(use_running_average=not training, momentum=0.5)(nn.Dense(8)(x)))
        return nn.Dense(3)(x)


class Late:
    """Holds up what a server is sent of some parts, until the test has ended."""

    def __init__(self, *parts):
        self._parts, self._over = parts, threading.Event()

    def __call__(self, server, method, arguments, call):
        if method == "push" and (arguments[1].number, arguments[1].part.number) in self._parts:
            self._over.wait(60)
        return call()

    def end(self):
        self._over.set()


@pytest.fixture
def cluster(monkeypatch):
    """Makes a strategy whose workers and servers are threads."""
    made = []

    def make(around=None, num_workers=3, num_ps=1, backup_workers=1):
        monkeypatch.setattr(strategy_module, "LocalProcesses", lambda: InlineEngine(around))
        strategy = distribute.ParameterServerStrategy(
            num_workers=num_workers, num_ps=num_ps, backup_workers=backup_workers)
        made.append((strategy, around))
        return strategy

    yield make
    for strategy, around in made:
        if isinstance(around, Late):
            around.end()
        strategy.coordinator.wait_until_idle()
        strategy.close()


def compiled(strategy, optimizer="adam", loss=None, module=None, kind=trainer.Model, **options):
    with strategy.scope():
        model = kind(module or nn.Dense(3), seed=0)
        model.compile(optimizer, Crossentropy() if loss is None else loss, **{"metrics": ["accuracy"], **options})
    return model


def bounds(rows, workers=3):
    return [rows * part // workers for part in range(workers + 1)]


def rows_of(first, rows, parts):
    """Returns the numbers of the rows of some parts of a batch that begins at `first`."""
    ends = bounds(rows)
    return np.concatenate([np.arange(first + ends[part], first + ends[part + 1]) for part in sorted(parts)])


def assert_same(received, expected, atol=1e-5):
    received, expected = jax.device_get((received, expected))
    for (path, leaf), other in zip(jax.tree.leaves_with_path(received), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=atol, err_msg=jax.tree_util.keystr(path))


CASES = {
    "adam": {},
    "two servers": {"num_ps": 2},
    "momentum": {"optimizer": optax.sgd(0.1, momentum=0.9)},
    "plateau": {"optimizer": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))},
    "weights": {"sample_weight": weights},
    "mean by weights": {"sample_weight": weights, "loss": Crossentropy(reduction="mean_with_sample_weight")},
    "mask": {"loss": Crossentropy(ignore_class=1)},
    "mask and penalty": {"loss": Crossentropy(ignore_class=1), "regularizers": {"**/kernel": "l2"}},
    "microbatches": {"microbatches": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
def test_an_update_is_that_of_a_batch_of_the_rows_that_counted(cluster, case):
    """One worker never ends the part that it is given first: the others make all updates, each of two of three parts.

    Batches have 7 rows, which do not divide, and the last has 5.
    """
    options = {**CASES[case]}
    weight, num_ps = options.pop("sample_weight", None), options.pop("num_ps", 1)
    model = compiled(cluster(Late((0, 2)), num_ps=num_ps), **options)
    expected = compiled(distribute.OneDeviceStrategy(), **options)
    history = model.fit(x, y, sample_weight=weight, batch_size=7, epochs=1, shuffle=False, verbose=0)
    losses, counted = [], []
    for number, first in enumerate(range(0, 40, 7)):
        rows = rows_of(first, min(7, 40 - first), {number % 3, (number + 1) % 3})
        losses.append(expected.train_on_batch(
            x[rows], y[rows], sample_weight=None if weight is None else weight[rows], return_dict=True)["loss"])
        counted.append(len(rows))
    assert_same(model.state, expected.state)
    assert history.history["dropped_rows"] == [40 - sum(counted)]
    np.testing.assert_allclose(history.history["loss"], np.average(losses, weights=counted), rtol=1e-4)


@pytest.mark.slow
def test_a_batch_with_fewer_rows_than_workers_counts_whole_if_enough_are_no_backups(cluster):
    model, expected = compiled(cluster()), compiled(distribute.OneDeviceStrategy())
    history, other = (each.fit(x, y, batch_size=2, epochs=2, verbose=0, validation_data=(x, y))
                      for each in (model, expected))
    assert_same(model.state, expected.state)
    assert history.history.pop("dropped_rows") == [0.0, 0.0]
    assert_same(history.history, other.history)


@pytest.mark.slow
def test_batches_that_the_chief_reads_are_sent_in_parts(cluster):
    def batches():
        for first in range(0, 40, 2):
            yield x[first:first + 2], y[first:first + 2]

    model, expected = compiled(cluster()), compiled(distribute.OneDeviceStrategy())
    for each in (model, expected):
        each.fit(batches(), epochs=1, verbose=0)
    assert_same(model.state, expected.state)


@pytest.mark.slow
def test_each_push_of_a_custom_loop_is_an_update_as_without_backup_workers(cluster):
    strategy = cluster()
    model = compiled(strategy, optax.sgd(0.1), metrics=[])
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)

    def step(state, batch):
        grads = jax.grad(lambda params: model.apply(params, state, batch)[0].mean())(state.params)
        return state.apply_gradients(grads)

    def train():
        strategy.run(step, args=(model.state, x[:8]))

    for _ in range(4):
        strategy.coordinator.schedule(train)
    strategy.coordinator.join()
    assert int(model.state.step) == 9
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert int(model.state.step) == 14


@pytest.mark.slow
def test_batch_norm_has_the_statistics_of_a_part_and_the_averages_of_all(cluster):
    """With plain SGD, parameters and averages after a step are the means of those after steps on each part."""
    model = compiled(cluster(Late((0, 1))), optax.sgd(0.1), module=Net())
    model.fit(x, y, batch_size=40, epochs=1, shuffle=False, verbose=0)
    states, rows = [], []
    for part in (0, 2):
        alone = compiled(distribute.OneDeviceStrategy(), optax.sgd(0.1), module=Net())
        alone.train_on_batch(x[rows_of(0, 40, {part})], y[rows_of(0, 40, {part})])
        states.append(jax.device_get((alone.state.params, alone.state.model_state)))
        rows.append(len(rows_of(0, 40, {part})))
    mean = jax.tree.map(lambda *leaves: np.average(leaves, axis=0, weights=rows), *states)
    assert_same((model.state.params, model.state.model_state), mean)


@pytest.mark.slow
def test_each_server_takes_the_parts_that_it_has_first(cluster):
    """Server 1 is sent parts 0 and 1 before 2. On server 0, part 1 is held up."""
    over, seen = threading.Event(), {part: threading.Event() for part in range(3)}

    def around(server, method, arguments, call):
        if method == "push" and arguments[1].number == 0:
            part = arguments[1].part.number
            if server == "ps 1":
                assert part != 2 or (seen[0].wait(60) and seen[1].wait(60))
                answer = call()
                seen[part].set()
                return answer
            assert part != 1 or over.wait(60)
        return call()

    model = compiled(cluster(around, num_ps=2), optax.sgd(0.1))
    model.fit(x, y, batch_size=40, epochs=1, shuffle=False, verbose=0)
    over.set()
    for name, parts in (("kernel", {0, 2}), ("bias", {0, 1})):  # the larger is on server 0
        expected = compiled(distribute.OneDeviceStrategy(), optax.sgd(0.1))
        expected.train_on_batch(x[rows_of(0, 40, parts)], y[rows_of(0, 40, parts)])
        assert_same(model.state.params[name], expected.state.params[name])


class Counter(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        rows = self.variable("counts", "rows", lambda: jnp.zeros((), jnp.float32))
        if training and not self.is_initializing():
            calls.value += 1
            rows.value += x.shape[0]
        return nn.Dense(3)(x)


@pytest.mark.slow
def test_model_state_is_combined_as_declared(cluster):
    model = compiled(cluster(), module=Counter(), state_reduction={"counts/rows": "sum"})
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    counts = model.state.model_state["counts"]
    assert int(counts["calls"]) == 10
    assert float(counts["rows"]) == 80 - sum(history.history["dropped_rows"])


def test_parts_draw_random_numbers_of_their_own(cluster):
    class Draws(trainer.Model):
        def train_step(self, state, batch):
            drawn = jax.random.uniform(self.make_rng(state, "dropout"))
            return {"loss": drawn}, state.apply_gradients({"w": jnp.full((1,), drawn)})

    class One(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.zeros, (1,))

    strategy = cluster()
    with strategy.scope():
        model = Draws(One())
        model.compile(optax.sgd(1.0))
    model.fit(np.ones((2, 1)), batch_size=2, epochs=1, verbose=0)
    drawn = [float(jax.random.uniform(stream_key(model.state.seed, "dropout", 0, part))) for part in range(2)]
    assert drawn[0] != drawn[1]
    np.testing.assert_allclose(model.state.params["w"], -np.mean(drawn), rtol=1e-5)


@pytest.mark.slow
def test_a_slow_worker_holds_up_no_round_and_its_rows_are_counted_as_dropped(cluster):
    slow = []

    def around(server, method, arguments, call):
        if method == "push" and InlineHandle.current.handle.name == "worker 1":
            slow.append(arguments[1].number)
            time.sleep(2.0)
        return call()

    model = compiled(cluster(around))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)  # compiles
    slow.clear()
    start = time.monotonic()
    history = model.fit(x, y, batch_size=8, epochs=6, verbose=0)
    assert time.monotonic() - start < 20.0, "30 steps, of 2 s each if they waited"
    assert int(model.state.step) == 35
    assert len(slow) < 15
    # Two of three parts of 8 rows count: 2, 3 or 3.
    assert all(10 <= dropped <= 15 for dropped in history.history["dropped_rows"])


@pytest.mark.slow
def test_a_worker_that_is_lost_after_its_part_has_counted_does_not_count_twice(cluster):
    """At step 1 the worker of the first of two parts is lost, at step 3 that of the second, which makes the update."""
    pushes, lock = {1: [], 3: []}, threading.Lock()

    def around(server, method, arguments, call):
        if method != "push" or arguments[1].number not in pushes:
            return call()
        with lock:
            answer, parts = call(), pushes[arguments[1].number]
            parts.append(arguments[1].part.number)
            if len(parts) == (arguments[1].number + 1) // 2:
                lose_current()
            return answer

    model, expected = compiled(cluster(around)), compiled(distribute.OneDeviceStrategy())
    with pytest.warns(UserWarning, match="is run again"):
        model.fit(x, y, batch_size=2, epochs=1, shuffle=False, verbose=0)
    expected.fit(x, y, batch_size=2, epochs=1, shuffle=False, verbose=0)
    assert all(sorted(set(parts)) == [0, 1] and len(parts) == 3 for parts in pushes.values())
    assert_same(model.state, expected.state)


def test_an_error_of_a_step_is_raised_and_training_can_go_on(cluster):
    broken = threading.Event()

    def around(server, method, arguments, call):
        if method == "push" and broken.is_set():
            raise RuntimeError("broken")
        return call()

    model = compiled(cluster(around))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    broken.set()
    with pytest.raises(RuntimeError, match="broken"):
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    broken.clear()
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert int(model.state.step) == 10


@pytest.mark.slow
def test_a_learning_rate_that_a_callback_sets_reaches_the_servers(cluster):
    def run(strategy):
        model = compiled(strategy, trainer.optimizers.SGD(0.1))
        schedule = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))
        model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[schedule])
        return model

    assert_same(run(cluster()).state, run(distribute.OneDeviceStrategy()).state)


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on(cluster, tmp_path):
    strategy = cluster()

    def fit(epochs, folder, batch_size):
        model = compiled(strategy)
        model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[
            callbacks.BackupAndRestore(tmp_path / folder, delete_checkpoint=False)])
        return model

    # All parts of batches of two rows count.
    whole, _, parts = fit(4, "whole", 2), fit(2, "parts", 2), fit(4, "parts", 2)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((whole.state, parts.state)))
    fit(2, "large", 7)
    assert int(fit(3, "large", 7).state.step) == 18


def a_server(state=None, rules=()):
    server = ParameterServer(scales_by_staleness=False)
    rule = trainer.Model(nn.Dense(1))
    rule.compile(optax.sgd(1.0), "mse")
    optimizer = rule._configuration.rules
    params = {"w": np.zeros(2, np.float32)}
    server.load("m", 1, optimizer, params, optimizer.init(params), state, rules)
    return server


def pushed(server, part, updates=0, grad=1.0, weight=1.0, generation=1, needed=2, state=None):
    grads = {"w": np.full(2, grad, np.float32)}
    return server.push("m", Push(Version(generation, updates), updates, grads, None, state,
                                 BatchPart(part, needed, weight, weight)))


def w_of(server):
    return server.snapshot("m")[1]["w"][0]


def test_a_server_counts_the_first_parts_by_their_weights_and_no_other():
    server = a_server()
    assert pushed(server, 2, grad=1.0, weight=3.0) == 0 and w_of(server) == 0
    assert pushed(server, 2, grad=1.0, weight=3.0) == 0 and w_of(server) == 0, "the same again"
    assert pushed(server, 0, grad=5.0, weight=1.0) == 0 and w_of(server) == -2.0
    assert pushed(server, 1, grad=9.0) is None, "late"
    assert pushed(server, 2) == 0 and pushed(server, 0) == 0, "they have counted, whoever asks again"
    assert pushed(server, 1, updates=1, generation=0) is None, "of a state before"
    assert server.snapshot("m")[0] == 1 and w_of(server) == -2.0
    assert pushed(server, 0, updates=1) == 0 and pushed(server, 1, updates=1) == 0
    assert pushed(server, 2) is None and server.snapshot("m")[0] == 2


def test_a_server_has_the_parameters_before_its_last_step_for_parts_that_others_need():
    server = a_server()
    pushed(server, 0)
    pushed(server, 1)
    assert server.pull("m", None, 0).version == Version(1, 0) and server.pull("m", None, 0).params["w"][0] == 0
    assert server.pull("m", Version(1, 0), 0).params is None
    assert server.pull("m", None, 1).version == Version(1, 1) == server.pull("m", None).version
    pushed(server, 0, updates=1)
    pushed(server, 1, updates=1)
    assert server.pull("m", None, 0).version == Version(1, 2), "gone"


def test_parts_that_weigh_nothing_have_a_mean():
    server = a_server()
    pushed(server, 0, grad=1.0, weight=0.0)
    pushed(server, 1, grad=3.0, weight=0.0)
    assert w_of(server) == pytest.approx(-2.0)


class WithPairs(trainer.Model):
    @distribute.on_global_batch
    def compute_loss(self, x, y, y_pred, sample_weight):
        return jnp.square(y_pred[:, None] - y_pred[None]).sum((1, 2)).mean()


class WithSum(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return jnp.square(y_pred).sum()


class WithTerm(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) + jnp.square(y_pred).mean()


class Centred(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x - x.mean(0))


class TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"a": nn.Dense(3)(x), "b": nn.Dense(3)(x)}


@pytest.mark.parametrize(("options", "message"), [
    ({"loss": Crossentropy(reduction="sum")}, r'reduction="sum".*sum_over_batch_size'),
    ({"kind": WithPairs}, r"compute_loss` cannot be used with `backup_workers`.*mean over rows"),
    ({"kind": WithSum}, r"compute_loss` cannot be used with `backup_workers`.*mean over rows"),
    ({"kind": WithTerm, "loss": Crossentropy(ignore_class=1)}, r"makes of it, may not.*ignore_class"),
    ({"module": Centred()}, r"other rows of the batch.*`backup_workers=0`"),
    ({"loss": Crossentropy(ignore_class=1), "microbatches": 2}, r"without `microbatches`.*ignore_class"),
    ({"loss": {"a": Crossentropy(ignore_class=1), "b": Crossentropy()}, "module": TwoOutputs(), "metrics": []},
     r"only if it is that of the one output.*ignore_class"),
], ids=["sum", "pairs", "own sum", "term", "module", "microbatches", "outputs"])
def test_what_is_no_mean_over_rows_is_refused(cluster, options, message):
    targets = {"a": y, "b": y} if "module" in options and isinstance(options["module"], TwoOutputs) else y
    with pytest.raises(ValueError, match=message):
        compiled(cluster(), **options).fit(x, targets, batch_size=8, verbose=0)


@pytest.mark.slow
def test_a_loss_of_the_users_own_that_is_a_mean_over_rows_trains(cluster):
    def run(strategy):
        model = compiled(strategy, kind=WithTerm, module=Net())
        model.fit(x, y, batch_size=2, epochs=1, verbose=0)
        return model

    assert int(run(cluster()).state.step) == 20


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"backup_workers": -1}, ValueError, "at least 0. Received: backup_workers=-1"),
    ({"backup_workers": 3}, ValueError, "fewer than the workers.*backup_workers=3, num_workers=3"),
    ({"backup_workers": 1.0}, TypeError, "`backup_workers` must be a whole number"),
    ({"backup_workers": True}, TypeError, "`backup_workers` must be a whole number"),
    ({"backup_workers": 1, "max_staleness": 0}, ValueError, "none is stale.*max_staleness=0"),
    ({"backup_workers": 1, "staleness": "scale"}, ValueError, "none is stale.*staleness='scale'"),
    ({"backup_workers": 1, "variable_partitioner": partitioners.FixedShardsPartitioner(2)}, ValueError,
     "no `variable_partitioner`.*backup_workers=1, variable_partitioner=FixedShardsPartitioner"),
])
def test_arguments_are_checked_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        distribute.ParameterServerStrategy(num_workers=3, num_ps=1, **arguments)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:worker:UserWarning")
def test_updates_are_exact_though_workers_are_killed():
    class Kill(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch % 2:
                slots = self.model.strategy.coordinator._slots
                threading.Timer(0.02, os.kill, (slots[epoch // 2 % 3].handle._process.pid, signal.SIGKILL)).start()

    class Rows(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.zeros, (64,)) + x @ self.param("v", nn.initializers.zeros, (64,))

    with distribute.ParameterServerStrategy(num_workers=3, num_ps=2, backup_workers=1) as strategy:
        model = compiled(strategy, optax.sgd(1.0), lambda y_true, y_pred: -y_pred, module=Rows(), metrics=[])
        history = model.fit(np.eye(64, dtype=np.float32), np.zeros(64, np.float32), batch_size=8, epochs=6, verbose=0,
                            callbacks=[Kill()])
        assert int(model.state.step) == 48
        for leaf in model.state.params.values():  # each update is a mean, whichever rows it is of
            np.testing.assert_allclose(np.sum(leaf), 48.0, rtol=1e-5)
        assert all(8 * 2 <= dropped <= 8 * 3 for dropped in history.history["dropped_rows"])
