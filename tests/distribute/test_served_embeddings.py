"""`nn.Embed` tables by rows: the numbers of one device, and no more than a batch's rows on the way."""

from __future__ import annotations

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer import callbacks, distribute, optimizers
from trainer.core.train_state import shapes_of
from trainer.core.tree_paths import named_leaves
from trainer.distribute.experimental import partitioners
from trainer.distribute.parameter_server.processes.wire import pack
from trainer.distribute.parameter_server.served_model import ServedModel
from trainer.distribute.parameter_server.server import ParameterServer
from trainer.engine.model.core.model_core import core_of
from trainer.engine.step.on_workers.remote_step import RemoteStep

pytestmark = pytest.mark.slow
SPLIT, ROWS, FEATURES = partitioners.FixedShardsPartitioner(2), 40, 4
rng = np.random.default_rng(0)
ids = rng.integers(0, ROWS, size=(90, 5)).astype(np.int32)
ids[:, 3:] = 0  # as padding has
y = rng.normal(size=(90, 1)).astype(np.float32)


class Recommender(nn.Module):
    """Two tables, one of which is looked up twice."""

    @nn.compact
    def __call__(self, x, training=False):
        users, items = nn.Embed(ROWS, FEATURES, name="users"), nn.Embed(ROWS + 1, FEATURES, name="items")
        return nn.Dense(1)(nn.relu(users(x).mean(1) + users(x[:, 0]) + items(x + 1).sum(1)))


class Bag(nn.Module):
    """One table."""

    embed: type = nn.Embed

    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(1)(self.embed(ROWS, FEATURES, name="table")(x).mean(1))


class Direct:
    """A server in this process, which counts the bytes on the way."""

    name = "ps"

    def __init__(self):
        self.server, self.nbytes = ParameterServer(False), 0

    def call(self, method, *arguments, timeout=None):
        answer = getattr(self.server, method)(*arguments)
        self.nbytes += sum(buffer.nbytes for value in (arguments, answer) for buffer in pack(value)[0].buffers)
        return answer


def made(strategy, optimizer="sgd", module=None, kind=trainer.Model, **options):
    with strategy.scope():
        model = kind(module or Recommender(), seed=0)
        model.compile(optimizer, "mse", **options)
    return model


def served(model, x=ids, servers=2, partitioner=SPLIT):
    """Returns a model on servers of this process, a client, and the step of a worker."""
    model.build(x[:2])
    handles = [Direct() for _ in range(servers)]
    on_servers = ServedModel("m", handles, partitioner)
    on_servers.embeddings = core_of(model).module.embeddings
    on_servers.load(model.state)
    shapes = shapes_of(model.state)
    client = on_servers.client(shapes)
    return on_servers, client, RemoteStep(model.train_step, shapes, client.partition.tables, None, None), handles


def one_device(*args, **options):
    return made(distribute.OneDeviceStrategy(), *args, **options)


def assert_same_state(model, expected, atol=2e-5):
    received, wanted = jax.device_get((getattr(model, "state", model), expected.state))
    for (path, leaf), other in zip(jax.tree.leaves_with_path(received), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=atol, err_msg=jax.tree_util.keystr(path))


def trained_on_servers(model, x, **kwargs):
    """Returns the state after three steps on a batch of all rows."""
    on_servers, client, step, _ = served(model, x, **kwargs)
    step.shapes_of_logs((x, y))
    for number in range(3):
        step(client, number, (x, y))
    return on_servers.fetch(client.shapes, model.strategy.place_state)[0]


# --- numbers ---------------------------------------------------------------------------------------------------------


class Doubled(nn.Embed):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        class Cell(nn.Module):
            @nn.compact
            def __call__(self, carry, x):
                return carry + nn.Embed(ROWS, FEATURES)(x), None

        scan = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
        return nn.Dense(1)(scan()(jnp.zeros((len(x), FEATURES)), x)[0])


class Computed(nn.Module):
    """Ids that depend on other parameters, and on the step's random stream."""

    @nn.compact
    def __call__(self, x, training=False):
        chosen = jnp.argmax(nn.Dense(ROWS)(x.astype(jnp.float32)), -1)
        drawn = jax.random.randint(self.make_rng("draw"), x.shape[:1], 0, ROWS)
        table = nn.Embed(ROWS, FEATURES)
        return nn.Dense(1)(table(chosen) + table(drawn))


def over_columns(axis):
    """Returns a layer with a table for each column (0), or one for all (None)."""
    mapped = nn.vmap(nn.Embed, variable_axes={"params": axis}, split_rngs={"params": axis == 0}, in_axes=1, out_axes=1)
    return lambda *args, **kwargs: mapped(*args, **kwargs)


@pytest.mark.parametrize(("module", "options"), [
    (Bag(Doubled), {}), (Bag(nn.remat(nn.Embed)), {}), (Bag(nn.jit(nn.Embed)), {}), (Bag(over_columns(None)), {}),
    (Scanned(), {}), (Computed(), {}), (Recommender(), {"microbatches": 2, "regularizers": {"**/kernel": "l2"}}),
    (Recommender(), {"remat": True, "freeze": "users"}), (Recommender(), {"precision": "mixed_bfloat16"}),
    (Recommender(), {"ema_decay": 0.9})],
    ids=["subclass", "remat", "jit", "vmap", "scan", "computed", "microbatches", "freeze", "bfloat16", "ema"])
def test_each_way_to_call_embed_gives_the_numbers_of_one_device(module, options):
    expected = one_device("adagrad", module, **options)
    state = trained_on_servers(one_device("adagrad", module, **options), ids)
    expected.fit(ids, y, batch_size=90, epochs=3, shuffle=False, verbose=0)
    assert_same_state(state, expected)


class TrainsOne(trainer.Model):
    """Two modules with tables, of which a step trains one."""

    def sample_inputs(self, batch):
        return dict.fromkeys(("one", "other"), batch[0] if isinstance(batch, tuple) else batch)

    def train_step(self, state, batch):
        def loss_fn(params):
            params = {**params, "other": jax.tree.map(jax.lax.stop_gradient, params["other"])}
            return ((sum(self.apply(params[name], state, batch[0], module=name)[0] for name in params) - batch[1]) ** 2
                    ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return {"loss": loss, "norm": optax.tree.norm(grads)}, state.apply_gradients(one=grads["one"])


def test_a_step_may_train_some_of_several_modules_that_have_tables():
    def make():
        model = TrainsOne({"one": Bag(), "other": Bag()}, seed=0)
        model.compile({"one": optax.sgd(0.1), "other": optax.adagrad(0.1)})
        return model

    expected = make()
    state = trained_on_servers(make(), ids)
    expected.fit(ids, y, batch_size=90, epochs=3, shuffle=False, verbose=0)
    assert_same_state(state, expected)


@pytest.mark.parametrize("x", [
    np.where(ids < 7, ids - ROWS, ids).astype(np.int8), np.where(ids < 7, ids - 70, ids + 7),
    np.where(ids < 7, ids.astype(np.uint32) + 2**31, ids).astype(np.uint32)], ids=["negative", "beyond", "uint32"])
def test_ids_that_no_row_has_do_what_they_do_on_one_device(x):
    class Filled(nn.Module):
        @nn.compact
        def __call__(self, x, training=False):
            return nn.Dense(1)(jnp.nan_to_num(nn.Embed(ROWS, FEATURES)(x), nan=0.5).mean(1))

    expected = one_device("adagrad", Filled())
    state = trained_on_servers(one_device("adagrad", Filled()), x)
    expected.fit(x, y, batch_size=90, epochs=3, shuffle=False, verbose=0)
    assert_same_state(state, expected)


@pytest.mark.parametrize("optimizer", [
    optax.sgd(0.1, momentum=0.9), optax.adamw(0.1),
    optax.chain(optax.sgd(optax.exponential_decay(0.1, 2, 0.5)), optax.contrib.reduce_on_plateau(patience=1))])
def test_an_optimizer_makes_its_own_update_of_rows_that_have_gradients(optimizer):
    every = np.arange(90 * 5, dtype=np.int32).reshape(90, 5) % ROWS
    expected, model = one_device(optimizer), one_device(optimizer)
    state = trained_on_servers(model, every)
    expected.fit(every, y, batch_size=90, epochs=3, shuffle=False, verbose=0)
    rows = state.params["items"]["embedding"][1:], expected.state.params["items"]["embedding"][1:]
    np.testing.assert_allclose(*rows, rtol=1e-4, atol=2e-5)  # no batch asks for the first
    np.testing.assert_allclose(*(each.params["users"]["embedding"] for each in (state, expected.state)),
                               rtol=1e-4, atol=2e-5)


@pytest.mark.smoke
def test_a_row_and_its_state_change_only_when_it_has_a_gradient():
    model = one_device("adam", Bag())
    on_servers, client, step, _ = served(model)
    before = jax.device_get(model.state)
    step(client, 0, (ids[:2] * 0 + [[1, 2, 2, 5, 5]] * 2, y[:2]))
    step(client, 1, (ids[:2] * 0 + 7, y[:2]))
    after = jax.device_get(on_servers.fetch(client.shapes, model.strategy.place_state)[0])
    changed = (after.params["table"]["embedding"] != before.params["table"]["embedding"]).any(1)
    assert list(np.flatnonzero(changed)) == [1, 2, 5, 7]
    (moments,) = (leaf for name, leaf in named_leaves(after.opt_state).items() if name.endswith("mu/table/embedding"))
    assert list(np.flatnonzero(moments.any(1))) == [1, 2, 5, 7]
    assert int(after.opt_state.count) == 2 == int(after.step)


# --- what is on the way ----------------------------------------------------------------------------------------------


def test_a_step_moves_the_rows_of_its_batch_alone():
    class Large(nn.Module):
        @nn.compact
        def __call__(self, x, training=False):
            return nn.Embed(50_000, 16)(x).mean((1, 2))[:, None]

    on_servers, client, step, handles = served(one_device("adagrad", Large()))
    for number in range(3):
        batch = rng.integers(0, 50_000, size=(16, 4)), y[:16]
        before = sum(handle.nbytes for handle in handles)
        step(client, number, batch)
        unique = len(np.unique(batch[0]))
        # The rows are pulled, and their gradients pushed; with 8 bytes for the place of each, and some scalars.
        assert sum(handle.nbytes for handle in handles) - before <= 2 * unique * (16 * 4 + 8) + 500
    before = sum(handle.nbytes for handle in handles)
    state, _ = on_servers.fetch(client.shapes, trainer.distribute.OneDeviceStrategy().place_state)
    assert sum(handle.nbytes for handle in handles) - before <= 3 * 64 * (2 * 16 * 4 + 8) + 500
    before = sum(handle.nbytes for handle in handles)
    on_servers.load(state.replace(opt_state=state.opt_state._replace(learning_rate=jnp.float32(0.5))))
    assert sum(handle.nbytes for handle in handles) - before <= 500


def test_rows_that_have_changed_since_a_state_was_fetched_are_those_of_the_state_that_is_loaded():
    model = one_device("adagrad", Bag())
    on_servers, client, step, _ = served(model)
    state, _ = on_servers.fetch(client.shapes, model.strategy.place_state)
    step(client, 0, (ids[:8], y[:8]))
    client.pull()
    on_servers.load(state)
    grads = {"table": {"embedding": np.ones((1, FEATURES), np.float32)}}
    client.push(1, grads, None, {}, {"table/embedding": np.zeros(1, np.int32)})  # of the state before
    after, updates = on_servers.fetch(client.shapes, model.strategy.place_state)
    assert updates == 0
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((after, state)))


def test_rows_are_scaled_by_staleness_and_pushed_once():
    model = one_device(optax.sgd(1.0), Bag())
    on_servers, client, _, handles = served(model)
    for handle in handles:
        handle.server._models["m"]._scales = True
    before = jax.device_get(model.state.params["table"]["embedding"])
    client.pull()
    number = np.array([3, 4], np.int32)
    grads = {"table": {"embedding": np.ones((2, FEATURES), np.float32)}}
    for push, staleness in ((0, 0), (1, 1), (1, 0)):  # without a pull between
        assert client.push(push, grads, None, {}, {"table/embedding": number}) == staleness
    after = on_servers.fetch(client.shapes, model.strategy.place_state)[0].params["table"]["embedding"]
    np.testing.assert_allclose((before - after)[3:5], 1.5, atol=1e-6)
    np.testing.assert_array_equal(np.delete(before - after, [3, 4], 0), 0)


# --- what is refused -------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        table = nn.Embed(ROWS, FEATURES)
        return table.attend(table(x).mean(1))[:, :1]


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        table = nn.Embed(ROWS, FEATURES)
        return (table(x).mean(1) @ table.embedding.T)[:, :1]


class WithSetup(nn.Embed):
    def setup(self):
        self.embedding = self.param("embedding", nn.initializers.normal(), (ROWS, FEATURES))


class Greedy(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        table = nn.Embed(ROWS, FEATURES)
        return nn.Dense(1)(table(jnp.argmax(table(x).mean(1), -1)))


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        table = nn.Embed(ROWS, FEATURES)
        return nn.Dense(1)(nn.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: m(x + 1), table, x).mean(1))


class LogsNorm(trainer.Model):
    def train_step(self, state, batch):
        logs, after = super().train_step(state, batch)
        return {**logs, "norm": optax.tree.norm(state.params)}, after


@pytest.mark.smoke
@pytest.mark.parametrize(("module", "message"), [
    (Attends(), r"table 'Embed_0/embedding' is used whole, by `attend`.*min_shard_bytes"),
    (Tied(), r"table 'Embed_0/embedding' is used by itself.*keep the table whole"),
    (Bag(WithSetup), r"`embedding` that `variable_partitioner` splits is not `nn.Embed`'s own.*another name"),
    (Greedy(), r"'Embed_0/embedding' is used to compute what is looked up"),
    (Branches(), r"'Embed_0/embedding' is looked up in a branch or a loop of unknown length \(cond\)")])
def test_a_module_that_needs_the_whole_table_is_refused(module, message):
    step = served(one_device(module=module))[2]
    with pytest.raises(ValueError, match=message):
        step.shapes_of_logs((ids, y))


@pytest.mark.parametrize(("kind", "options"), [
    (LogsNorm, {}), (trainer.Model, {"regularizers": {"**/embedding": "l2"}})])
def test_a_step_that_looks_at_all_parameters_is_refused(kind, options):
    step = served(one_device(module=Bag(), kind=kind, **options))[2]
    with pytest.raises(ValueError, match=r"'table/embedding' is used by a step otherwise.*operation 'square'"):
        step.shapes_of_logs((ids, y))


@pytest.mark.parametrize(("optimizer", "message"), [
    ("lamb", "several rows or arrays"), (optimizers.SGD(0.1, gradient_accumulation_steps=2), "collects gradients"),
    (optax.MultiSteps(optax.sgd(0.1), 2), "collects gradients"), (optax.lookahead(optax.sgd(0.1), 2, 0.5), "averages"),
    (optax.adafactor(0.1, min_dim_size_to_factor=2), "no row for each row"),
    (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), "several rows or arrays at once")])
@pytest.mark.parametrize("servers", [1, 2])
def test_an_optimizer_that_looks_across_rows_is_refused(optimizer, message, servers):
    with pytest.raises(ValueError, match=rf"{message}.*each row on its own.*no partitioner"):
        served(one_device(optimizer, Bag()), servers=servers)
    served(one_device("lamb", Bag()), servers=servers, partitioner=None)


class Own(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(1)(self.param("embedding", nn.initializers.normal(), (ROWS, FEATURES))[x].mean(1))


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.table, self.dense = nnx.Embed(ROWS, FEATURES, rngs=rngs), nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.table(x).mean(1))


def test_only_tables_that_the_partitioner_splits_are_split():
    model = one_device()
    for partitioner, tables in [
            (None, set()), (partitioners.MinSizePartitioner(328, max_shards=2), {"items/embedding"}),
            (SPLIT, {"users/embedding", "items/embedding"})]:
        assert served(model, partitioner=partitioner)[1].partition.tables == tables
    for module in (Own(), OfNNX(nnx.Rngs(0)), Bag(over_columns(0))):
        _, client, step, _ = served(one_device(module=module))
        assert not client.partition.tables
        step(client, 0, (ids, y))


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2])
def one_worker(request):
    with distribute.ParameterServerStrategy(
            num_workers=1, num_ps=request.param, variable_partitioner=SPLIT) as strategy:
        yield strategy


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", [optimizers.SGD(0.1), "adagrad"], ids=["sgd", "adagrad"])
def test_fit_gives_the_numbers_of_one_device(one_worker, optimizer):
    schedule = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))

    def run(strategy):
        model = made(strategy, optimizer)
        return model, model.fit(ids, y, batch_size=16, epochs=3, verbose=0, callbacks=[schedule],
                                validation_data=(ids, y))

    (model, history), (expected, expected_history) = run(one_worker), run(distribute.OneDeviceStrategy())
    assert_same_state(model, expected)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(history.history[name], expected_history.history[name], rtol=1e-4)
    np.testing.assert_allclose(model.predict(ids, verbose=0), expected.predict(ids, verbose=0), atol=1e-4)
    assert model.evaluate(ids, y, verbose=0) == pytest.approx(expected.evaluate(ids, y, verbose=0), rel=1e-4)


@pytest.mark.processes
def test_a_learning_rate_that_a_callback_sets_is_sent_without_the_tables(one_worker, monkeypatch):
    sent = []
    handle = type(one_worker._servers[0])
    call = handle.call_packed

    def counted(self, method, packed, timeout=None):
        sent.append((method, sum(buffer.nbytes for buffer in packed.buffers)))
        return call(self, method, packed, timeout)

    monkeypatch.setattr(handle, "call_packed", counted)
    model = made(one_worker, optimizers.SGD(0.1), Bag())
    model.fit(ids, y, batch_size=16, epochs=3, verbose=0,
              callbacks=[callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))])
    assert [method for method, _ in sent].count("load_table") == one_worker.num_ps
    assert 0 < [method for method, _ in sent].count("replace_rows") <= 2 * one_worker.num_ps
    assert all(size < 100 for method, size in sent if method == "replace_rows")


@pytest.mark.processes
def test_a_run_goes_on_with_another_number_of_servers(one_worker, tmp_path):
    def fit(strategy, epochs, folder):
        model = made(strategy, "adagrad")
        model.fit(ids, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[
            callbacks.BackupAndRestore(folder, delete_checkpoint=False)])
        return model

    fit(one_worker, 1, tmp_path)
    with distribute.ParameterServerStrategy(
            num_workers=1, num_ps=3 - one_worker.num_ps, variable_partitioner=SPLIT) as other:
        model = fit(other, 2, tmp_path)
        expected = one_device("adagrad")
        expected.fit(ids, y, batch_size=16, epochs=2, verbose=0)
        assert_same_state(model, expected)


@pytest.mark.processes
def test_a_custom_loop_gives_the_numbers_of_one_device(one_worker):
    def step(state, batch):
        def loss_fn(params):
            outputs, model_state = model.apply(params, state, batch[0], training=True)
            return ((outputs - batch[1]) ** 2).mean(), model_state

        grads, model_state = jax.grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, model_state=model_state)

    def train(batch):
        one_worker.run(step, args=(model.state, batch))

    model, expected = made(one_worker, "adagrad"), one_device("adagrad")
    model.build(ids[:1])
    coordinator = distribute.ClusterCoordinator(one_worker)
    for start in (0, 30, 60):
        coordinator.schedule(train, ((ids[start:start + 30], y[start:start + 30]),)).fetch()
    expected.fit(ids, y, batch_size=30, shuffle=False, verbose=0)
    assert_same_state(model, expected)
    model.fit(ids, y, batch_size=30, epochs=1, shuffle=False, verbose=0)
    expected.fit(ids, y, batch_size=30, epochs=1, shuffle=False, verbose=0)
    assert_same_state(model, expected)

    coordinator.schedule(lambda x: np.asarray(model(x)), (ids,))
    with pytest.raises(ValueError, match=r"gets its rows in `strategy.run` alone"):
        coordinator.join()


class Sum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Embed(64, 1, embedding_init=nn.initializers.zeros)(x)[:, 0].sum(-1)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:worker:UserWarning")
def test_rows_of_a_worker_that_is_killed_are_trained_once():
    class Kill(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch % 2:
                slots = self.model.strategy.coordinator._slots
                victim = slots[epoch // 2 % 2].handle._process.pid
                threading.Timer(0.01, os.kill, (victim, signal.SIGKILL)).start()

    with distribute.ParameterServerStrategy(num_workers=2, num_ps=2, variable_partitioner=SPLIT) as strategy:
        with strategy.scope():
            model = trainer.Model(Sum())
            model.compile(optax.sgd(1.0), lambda y_true, y_pred: -8.0 * y_pred)
        model.fit(np.arange(64)[:, None], np.zeros(64, np.float32), batch_size=8, epochs=6, verbose=0,
                  callbacks=[Kill()])
        assert int(model.state.step) == 48
        np.testing.assert_allclose(model.state.params["Embed_0"]["embedding"], 6.0, rtol=1e-6)
