"""Data that is placed on the devices once, and gathered there: the same numbers, and when it happens."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.hlo import collectives
from tests.support.networks import NNXMLP, LinenMLP, classification, compiled_mlp, logits_loss, mirrored
from trainer.data import Dataset
from trainer.data.sources.arrays import HostArrays, aligned_empty, is_aligned
from trainer.data.sources.groups import Group
from trainer.distribute.placement import device_cache, placement
from trainer.distribute.strategies import strategy
from trainer.engine.loop import running_phase
from trainer.engine.model.core.model_core import core_of

ROWS, BATCH = 53, 8  # an uneven last batch of five rows


@pytest.fixture(autouse=True)
def as_on_accelerators(monkeypatch):
    """Arrays that are read again stay on the devices, which CPU devices leave out."""
    monkeypatch.setattr(trainer.distribute.Strategy, "keeps_arrays", True)


def train(replicas=1, module=LinenMLP, steps_per_epoch=None, callbacks=None, under=None, **options):
    """Returns the weights, the history and the predictions of a run."""
    x, y, weights = classification(ROWS)
    with (under or mirrored(replicas)).scope():
        model = trainer.Model(module(batch_norm=True, dropout=0.2), seed=1)
        model.compile(trainer.optimizers.SGD(0.1, momentum=0.9), logits_loss(), metrics=["accuracy"], **options)
    history = model.fit(x, y, batch_size=BATCH, epochs=3, steps_per_epoch=steps_per_epoch, sample_weight=weights,
                        validation_data=(x[:21], y[:21]), callbacks=callbacks, verbose=0)
    return model.get_weights(), history.history


def assert_same_numbers(one, other):
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "module", "options"), [
    (1, LinenMLP, {}), (4, LinenMLP, {"steps_per_execution": 3}), (2, NNXMLP, {"steps_per_execution": 1})], ids=str)
def test_data_on_the_device_and_data_sent_there_give_the_same_bits(replicas, module, options):
    runs = [train(replicas, module, data_on_device=on_device, **options) for on_device in (True, False)]
    for mine, theirs in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_single_steps_for_a_callback_give_the_bits_of_fused_ones():
    seen = []
    every_batch = trainer.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    fused = train(2, steps_per_epoch=5)
    single = train(2, steps_per_epoch=5, callbacks=[every_batch])
    for mine, theirs in zip(jax.tree.leaves(fused), jax.tree.leaves(single), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert_same_numbers(fused, train(2, steps_per_epoch=5, data_on_device=False))
    assert seen == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]


@pytest.mark.slow
def test_row_numbers_of_many_batches_are_placed_at_once_and_change_no_bit(monkeypatch):
    placed, place = [], strategy.Strategy.place_group
    monkeypatch.setattr(strategy.Strategy, "place_group", lambda self, group, arrays=None, *rest: (
        placed.append(group.count) if arrays is not None else None, place(self, group, arrays, *rest))[1])
    whole = train(2, steps_per_execution=2)
    # An epoch and its validation, each with an uneven last batch, and in between the first numbers of the next epoch.
    assert placed == [6, 1, 6, 2, 1, 1, 6, 2, 1, 1, 2, 1]
    placed.clear()
    monkeypatch.setattr(running_phase, "_NUMBERS_AT_ONCE", 4 * BATCH)
    in_parts = train(2, steps_per_execution=2)
    assert placed == [4, 2, 1, 4, 2, 1, 2, 1, 4, 2, 1, 2, 1, 2, 1]
    for mine, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(in_parts), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture
def small_memory(monkeypatch):
    """Makes the devices so small that the data do not fit on one of them, but do on four."""
    x, y, weights = classification(ROWS)
    nbytes = HostArrays((x, y, weights)).nbytes
    monkeypatch.setattr(strategy, "memory_bytes", lambda device: nbytes / 2 / placement.DATA_FRACTION)


@pytest.mark.slow
def test_data_that_one_device_cannot_hold_is_split_over_all(small_memory):
    split, streamed = mirrored(4), mirrored(4)
    arrays = HostArrays(classification(ROWS)[:2])
    placed = split.place_arrays(arrays)
    assert {leaf.addressable_shards[0].data.shape[0] for leaf in jax.tree.leaves(placed)} == {56 // 4}
    assert_same_numbers(train(under=split, data_on_device="auto"), train(under=streamed, data_on_device=False))


def test_data_that_all_devices_cannot_hold_is_sent_in_batches_unless_it_is_forced(small_memory):
    arrays = HostArrays(classification(ROWS))
    one_device = mirrored(1)
    assert one_device.place_arrays(arrays) is None
    assert one_device.cached_arrays(arrays) is None
    assert one_device.place_arrays(arrays, forced=True) is not None


def placements(monkeypatch):
    """Returns a list that grows by the bytes of whatever is placed."""
    placed = []
    real = placement.copy_to_devices

    def place(arrays, *rest):
        placed.append(arrays.nbytes)
        return real(arrays, *rest)

    monkeypatch.setattr(strategy, "copy_to_devices", place)
    return placed


@pytest.mark.slow
def test_what_is_read_once_is_not_placed(monkeypatch):
    x, y, _ = classification(ROWS)
    model = compiled_mlp(2)
    placed = placements(monkeypatch)
    model.fit(x, y, validation_data=(x, y), verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert not placed
    model.fit(x, y, epochs=3, validation_data=(x, y), validation_freq=[3], verbose=0)
    assert len(placed) == 1
    model.fit(x, y, epochs=3, validation_data=(x + 1, y), verbose=0)
    assert len(placed) == 2


@pytest.mark.slow
def test_on_cpu_devices_only_what_is_forced_is_placed(monkeypatch):
    x, y, _ = classification(ROWS)
    monkeypatch.undo()
    placed = placements(monkeypatch)
    compiled_mlp(2).fit(x, y, epochs=2, validation_data=(x, y), verbose=0)
    assert not placed
    compiled_mlp(2, data_on_device=True).fit(x, y, validation_data=(x, y), verbose=0)
    assert len(placed) == 1


@pytest.fixture
def unpadded(monkeypatch):
    """Arrays keep their length on the devices, by which a test knows its own."""
    monkeypatch.setattr(placement, "_shared_length", lambda rows, size: rows)


@pytest.mark.slow
@pytest.mark.usefixtures("unpadded")
def test_arrays_are_placed_once_for_all_fits_and_let_go_with_them(monkeypatch):
    x, y = (array.copy() for array in classification(ROWS)[:2])
    model = compiled_mlp(2)
    placed = placements(monkeypatch)
    for _ in range(3):
        model.fit(x, y, epochs=2, validation_data=(x[:8], y[:8]), verbose=0)
        model.fit(x[:], y[:], epochs=2, verbose=0)
    assert len(placed) == 2
    shape = (ROWS, 6)
    assert any(array.shape == shape for array in jax.live_arrays())
    del x
    gc.collect()
    assert not any(array.shape == shape for array in jax.live_arrays())


@pytest.mark.slow
@pytest.mark.parametrize("contiguous", [True, False])
def test_arrays_that_were_written_to_are_placed_anew(monkeypatch, contiguous):
    rows = classification(ROWS)
    x = rows[0].copy() if contiguous else np.repeat(rows[0], 2, axis=1)[:, ::2]
    model, fresh = compiled_mlp(2), compiled_mlp(2)
    placed = placements(monkeypatch)
    model.fit(x, rows[1], epochs=2, shuffle=False, verbose=0)
    x *= -1
    logs = model.fit(x, rows[1], epochs=2, shuffle=False, verbose=0).history
    assert len(placed) == 2
    fresh.fit(rows[0], rows[1], epochs=2, shuffle=False, verbose=0)
    assert fresh.fit(-rows[0], rows[1], epochs=2, shuffle=False, verbose=0).history == logs


@pytest.mark.slow
@pytest.mark.usefixtures("unpadded")
def test_of_arrays_only_the_last_two_stay_placed():
    model, kept = compiled_mlp(2), []
    for width in range(3):
        x, y, _ = classification(ROWS + width)
        kept.append((x, y))
        model.fit(x, y, epochs=2, verbose=0)
    gc.collect()
    rows = {array.shape[0] for array in jax.live_arrays() if array.shape[1:] == (6,)}
    assert ROWS not in rows and {ROWS + 1, ROWS + 2} <= rows


def as_dataset(x, y):
    return trainer.data.Dataset.from_arrays((x, y)).batch(8)


def ones_model(replicas=1, **options):
    """A model whose loss is the square of the distance between 1 and the targets."""
    with mirrored(replicas).scope():
        model = trainer.Model(nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones))
        model.compile(optax.sgd(0.0), "mse", **options)
    return model


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("replicas", "options", "make"), [
    (1, {}, lambda x, y: (x, y)), (2, {}, as_dataset), (1, {"data_on_device": False}, lambda x, y: (x, y))],
    ids=["arrays", "a dataset", "sent"])
def test_what_a_callback_writes_to_arrays_is_seen_by_the_next_epoch_and_validation(replicas, options, make):
    x, y = np.ones((16, 1), np.float32), np.ones((16, 1), np.float32)
    data, model = make(x, y), ones_model(replicas, **options)
    data = {"x": data} if isinstance(data, Dataset) else {"x": x, "y": y}

    def write(epoch, logs=None):
        y[...] = 2 + epoch

    changes = trainer.callbacks.LambdaCallback(on_epoch_end=write)
    history = model.fit(**data, validation_data=make(x, y), epochs=3, verbose=0, callbacks=[changes]).history
    assert history == {"loss": [0.0, 1.0, 4.0], "val_loss": [0.0, 1.0, 4.0]}
    y[...] = 0
    assert model.evaluate(**data, verbose=0)["loss"] == 1.0
    y[...] = 4
    assert model.fit(**data, epochs=2, verbose=0).history["loss"] == [9.0, 9.0]


@pytest.mark.slow
def test_what_a_callback_writes_is_checked_as_what_was_given():
    x, y, _ = classification(16)

    def write(epoch, logs=None):
        y[0] = 7

    with pytest.raises(ValueError, match="label 7"):
        compiled_mlp().fit(x, y, epochs=2, verbose=0, callbacks=[trainer.callbacks.LambdaCallback(on_epoch_end=write)])


def test_integers_that_a_callback_writes_are_refused_if_they_would_wrap_around():
    x, y, _ = classification(16)
    y = y.astype(np.int64)

    def write(epoch, logs=None):
        y[0] = 2**32

    with pytest.raises(ValueError, match="`y` must fit into int32"):
        compiled_mlp().fit(x, y, epochs=2, verbose=0, callbacks=[trainer.callbacks.LambdaCallback(on_epoch_end=write)])


def test_arrays_are_compared_only_where_a_callback_may_have_written(monkeypatch):
    compared, real = [], device_cache.checksums
    monkeypatch.setattr(device_cache, "checksums", lambda array: compared.append(1) or real(array))
    x, y, _ = classification(16)
    model = compiled_mlp()
    model.fit(x, y, epochs=3, verbose=0, callbacks=[trainer.callbacks.EarlyStopping("loss")])
    assert len(compared) == 2
    model.fit(x, y, epochs=3, verbose=0, callbacks=[trainer.callbacks.LambdaCallback(on_epoch_end=lambda *_: None)])
    assert len(compared) == 2 * 2 + 2 * 3


@pytest.mark.slow
def test_what_was_placed_of_arrays_is_let_go_once_they_were_written_to():
    kept, x, references = device_cache.PlacedArrays(), np.zeros((8, 2), np.float32), []
    for value in (0, 0, 1):
        x[:] = value
        placed = kept.get_or_place(HostArrays(x), lambda: jax.device_put(x.copy()), (), 0)
        references.append(weakref.ref(placed))
        assert float(placed.max()) == value
        del placed
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False]


def test_checksums_tell_where_any_byte_differs():
    array = np.random.default_rng(0).normal(size=(3000, 700))
    before = device_cache.checksums(array)
    assert len(before) > 2 and device_cache.checksums(array.copy()) == before
    array[-1, -1] = -array[-1, -1]
    after = device_cache.checksums(array)
    assert after[:-1] == before[:-1] and after[-1] != before[-1]
    assert device_cache.checksums(np.zeros((4, 0))) == device_cache.checksums(np.zeros((4, 0)))


@pytest.mark.slow
@pytest.mark.usefixtures("unpadded")
def test_a_dataset_is_placed_once_for_all_fits_and_let_go_with_it(monkeypatch):
    x, y = (array.copy() for array in classification(ROWS)[:2])
    model = compiled_mlp(2)
    placed = placements(monkeypatch)
    dataset = Dataset.from_arrays((x, y)).shuffle(1).batch(BATCH)
    model.fit(dataset, epochs=2, verbose=0)
    model.fit(dataset.take(3), epochs=2, verbose=0)
    history = model.fit(dataset, verbose=0)
    assert model.evaluate(dataset, verbose=0)["loss"] < history.history["loss"][0]
    assert len(placed) == 1
    shape = (ROWS, 6)
    assert any(array.shape == shape for array in jax.live_arrays())
    del dataset, x
    gc.collect()
    assert not any(array.shape == shape for array in jax.live_arrays())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_copy_on_the_device_is_not_the_users_array(aligned, replicas):
    memory = aligned_empty((65, 6), np.float32)
    x = memory[:64] if aligned else memory.reshape(-1)[1:385].reshape(64, 6)
    x[:] = 1
    assert is_aligned(x) == aligned
    placed = mirrored(replicas).place_arrays(HostArrays(x))
    x[:] = 2
    assert np.asarray(placed).max() == 1


def test_arrays_are_placed_in_the_dtypes_that_jax_gives_them():
    arrays = HostArrays({"wide": np.ones((3, 2), np.float64), "flags": np.ones(3, bool), "labels": np.arange(3)})
    placed = mirrored(2).place_arrays(arrays)
    assert {name: leaf.dtype.name for name, leaf in placed.items()} == {
        "wide": "float32", "flags": "bool", "labels": "int32"}
    assert arrays.nbytes == sum(leaf[:3].nbytes for leaf in jax.tree.leaves(placed))


def test_small_arrays_of_many_lengths_need_few_programs():
    model, (x, y, _) = compiled_mlp(2), classification(64)
    model.fit(x[:40], y[:40], batch_size=BATCH, epochs=2, verbose=0)
    with count_compilations() as compiled:
        model.fit(x[:48], y[:48], batch_size=BATCH, epochs=2, verbose=0)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    assert not compiled


def test_large_arrays_are_placed_without_padding(monkeypatch):
    monkeypatch.setattr(placement, "SMALL_BYTES", 1000)
    x = np.ones((ROWS, 6), np.float32)
    assert mirrored(2).place_arrays(HostArrays(x)).shape == x.shape


@pytest.mark.slow
def test_arrays_of_a_single_group_need_no_thread(monkeypatch):
    model, (x, y, _) = compiled_mlp(), classification(16)
    model.build(x)
    monkeypatch.setattr(
        running_phase, "prefetch", lambda *arguments, **options: pytest.fail("nothing can be placed ahead"))
    assert model.predict_on_batch(x).shape == (16, 3)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert model.evaluate(x, y, batch_size=BATCH, verbose=0)["loss"] > 0


@pytest.mark.slow
def test_on_cpu_devices_no_thread_gathers_rows_and_elsewhere_one_does(monkeypatch):
    x, y, _ = classification(ROWS)
    threads, results = [], []
    real = running_phase.prefetch
    monkeypatch.setattr(
        running_phase, "prefetch", lambda *arguments, **options: threads.append(1) or real(*arguments, **options))
    for is_on_cpu in (True, False):
        model = compiled_mlp(data_on_device=False, steps_per_execution=2)
        monkeypatch.setattr(model.strategy, "is_on_cpu", is_on_cpu)
        model.fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x, y), verbose=0)
        results.append([*model.get_weights(), model.predict(x, batch_size=BATCH, verbose=0),
                        *model.history.history["val_loss"]])
        assert len(threads) == (0 if is_on_cpu else 2 + 2 + 1)
    for gathered, prefetched in zip(*results, strict=True):
        np.testing.assert_array_equal(gathered, prefetched)


def test_the_devices_keep_few_numbers_of_batches():
    assert running_phase._batches_at_once(256, 1) == running_phase._BATCHES_AT_ONCE
    assert running_phase._batches_at_once(256, 2**14) == 256


def test_gathering_from_whole_copies_needs_no_collective():
    x, y, _ = classification(ROWS)
    under = mirrored(4)
    numbers = np.arange(4 * BATCH, dtype=np.int32).reshape(4, BATCH)
    group = under.place_group(Group(numbers, 4, BATCH, 0), under.place_arrays(HostArrays((x, y))))
    gather = placement._gathering(4, group.data.numbers.sharding)
    assert not collectives(gather.lower(group.data, under.place_number(0)).compile().as_text())
    np.testing.assert_array_equal(under.stack_at(group, 0, 4).data[0], x[numbers])


def test_a_stack_has_one_shape_wherever_it_begins():
    under = mirrored(2)
    numbers = np.arange(5 * BATCH, dtype=np.int32).reshape(5, BATCH)
    x = np.arange(5 * BATCH, dtype=np.float32)
    group = under.place_group(Group(numbers, 5, BATCH, first=7), under.place_arrays(HostArrays(x)))
    whole, rest = (under.stack_at(group, start, 3) for start in (0, 3))
    assert [(each.first, each.count) for each in (whole, rest)] == [(7, 3), (10, 2)]
    assert whole.spec == rest.spec
    np.testing.assert_array_equal(rest.data[:2], x[numbers[3:]])


def test_forcing_data_that_is_not_arrays_is_refused():
    x, y, _ = classification(16)
    model = compiled_mlp(2, data_on_device=True)
    with pytest.raises(ValueError, match="`data_on_device=True` needs data that batches are rows of"):
        model.fit(iter([(x, y)] * 4), verbose=0)
    with pytest.raises(ValueError, match="without `map`"):
        model.fit(Dataset.from_arrays((x, y)).batch(8).map(lambda x, y: (x + 1, y)), verbose=0)
    assert len(model.predict(iter([x]), verbose=0)) == 16


def test_other_words_are_refused():
    with pytest.raises(ValueError, match=r"`data_on_device` must be True, False or 'auto'\. Received: 'gpu'"):
        compiled_mlp(2, data_on_device="gpu")


def test_a_label_outside_of_the_classes_is_refused_before_anything_compiles():
    x, y, _ = classification(64)
    y[60] = 7
    model = compiled_mlp(2)
    with pytest.raises(ValueError, match="label 7"):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert not core_of(model).configuration.phases["train"].programs.compiled


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("data_on_device", [True, False])
def test_the_executions_before_a_bad_label_run(data_on_device):
    x, y, _ = classification(64)
    y[60] = 7
    model = compiled_mlp(2, steps_per_execution=3, data_on_device=data_on_device)
    with pytest.raises(ValueError, match="label 7"):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert int(model.state.step) == 6


@pytest.mark.slow
def test_bad_labels_of_an_epoch_do_not_end_the_one_before():
    x, y, _ = classification(64)
    y[60] = 7
    ended = []
    callback = trainer.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ended.append(epoch))
    with pytest.raises(ValueError, match="label 7"):
        compiled_mlp(2).fit(x, y, batch_size=8, epochs=2, steps_per_epoch=4, shuffle=False, verbose=0,
                            callbacks=[callback])
    assert ended == [0]


@pytest.mark.slow
def test_a_label_that_is_never_read_does_no_harm():
    x, y, _ = classification(64)
    y[60] = 7
    dataset = Dataset.from_arrays((x, y)).take(48).batch(8)
    assert compiled_mlp(2).fit(dataset, epochs=2, verbose=0).epoch == [0, 1]
