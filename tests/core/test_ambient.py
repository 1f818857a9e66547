"""The one context: fields that nest and end, what other threads and processes find of it, and JAX's options."""

from __future__ import annotations

import concurrent.futures
import contextvars
import dataclasses
import pickle
import threading

import jax
import numpy as np
import pytest

from tests.support.waiting import GUARD_SECS
from trainer.core.ambient import state
from trainer.core.ambient.jax_options import OPTIONS, JaxOptions
from trainer.core.ambient.processes import SentContext
from trainer.core.ambient.threads import in_caller_context

FIELDS = {field.name for field in dataclasses.fields(state.Ambient)}
OF_THE_USER = {"strategy", "strategy_elsewhere", "custom_objects", "reader"}
# Values that are not JAX's own, by option.
CHANGED = {
    "check_tracer_leaks": True, "debug_infs": True, "debug_nans": True, "default_matmul_precision": "float32",
    "default_prng_impl": "rbg", "disable_jit": True, "enable_x64": True, "log_compiles": True,
    "numpy_dtype_promotion": "strict", "numpy_rank_promotion": "raise", "threefry_partitionable": False,
    "transfer_guard": "disallow", "transfer_guard_device_to_host": "log",
}

user_variable = contextvars.ContextVar("user_variable", default="nothing")


def in_thread(function):
    """Returns what a function returns that runs in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def option(name):
    return getattr(jax.config, f"jax_{name}")


def test_fields_nest_and_end_with_their_blocks():
    with state.replaced(strategy="outer", replica=1):
        with state.replaced(strategy="inner"):
            assert (state.current().strategy, state.current().replica) == ("inner", 1)
        assert (state.current().strategy, state.current().replica) == ("outer", 1)
    assert state.current() == state.Ambient()


def test_a_block_that_raises_gives_its_field_back():
    with pytest.raises(KeyError), state.replaced(strategy="inner"):
        raise KeyError(state.current().strategy)
    assert state.current() == state.Ambient()


def test_a_field_that_is_not_there_cannot_be_replaced():
    with pytest.raises(TypeError, match="stratgy"), state.replaced(stratgy="misspelt"):
        pass


def test_a_thread_of_the_users_own_begins_outside_of_everything():
    with state.replaced(**dict.fromkeys(FIELDS, "set")):
        assert in_thread(state.current) == state.Ambient()


def test_threads_have_the_users_surroundings_and_nothing_of_a_trace():
    with state.replaced(**dict.fromkeys(FIELDS, "set")):
        function = in_caller_context(state.current)
    found = in_thread(function)
    assert {name for name in FIELDS if getattr(found, name) == "set"} == OF_THE_USER
    assert found == state.Ambient(**dict.fromkeys(OF_THE_USER, "set"))


def test_threads_have_the_users_context_variables_of_when_the_function_was_made():
    token = user_variable.set("before")
    function = in_caller_context(user_variable.get)
    user_variable.set("after")
    assert in_thread(function) == "before"
    user_variable.reset(token)


def test_what_a_thread_sets_stays_in_its_call():
    @in_caller_context
    def append():
        user_variable.set(user_variable.get() + "!")
        return user_variable.get()

    assert [in_thread(append), in_thread(append), user_variable.get()] == ["nothing!", "nothing!", "nothing"]


def test_several_threads_may_call_a_function_at_a_time():
    barrier = threading.Barrier(3, timeout=GUARD_SECS)

    def meet(number):
        barrier.wait()
        return number, option("numpy_rank_promotion")

    with jax.numpy_rank_promotion("raise"):
        function = in_caller_context(meet)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(function, range(3))) == [(number, "raise") for number in range(3)]


@pytest.mark.parametrize("name", CHANGED)
def test_threads_have_the_callers_jax_option_and_give_it_back(name):
    before = option(name)
    with getattr(jax, name)(CHANGED[name]):
        expected = option(name)
        function = in_caller_context(lambda: option(name))
    assert expected != before
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert [pool.submit(each).result() for each in (function, lambda: option(name))] == [expected, before]


def test_threads_have_the_callers_default_device(devices):
    with jax.default_device(devices[3]):
        function = in_caller_context(lambda: jax.numpy.zeros(2).devices())
    assert in_thread(function) == {devices[3]}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_has_a_context_manager_of_jax(name):
    manager = getattr(jax, name.removeprefix("jax_"))
    before = getattr(jax.config, name)
    with manager(before):
        assert getattr(jax.config, name) == before


def test_the_options_are_all_that_jax_has_context_managers_for_but_the_guard_of_threads():
    managed = {name for name in dir(jax) if type(getattr(jax, name)) is type(jax.enable_x64)}
    known = {option.removeprefix("jax_") for option in OPTIONS}
    assert managed - known == {"thread_guard"}
    assert known - managed == {"disable_jit", "transfer_guard"}  # which are functions


def test_a_guard_for_one_direction_stays_in_one_for_all():
    with jax.transfer_guard("disallow"), jax.transfer_guard_host_to_device("allow"):
        options = JaxOptions()
    with options.entered():
        found = [option(f"transfer_guard_{way}") for way in ("host_to_device", "device_to_host", "device_to_device")]
    assert found == ["allow", "disallow", "disallow"]


def test_options_that_are_those_of_all_threads_follow_later_changes():
    with jax.debug_nans(True):
        options = JaxOptions()
    before = option("numpy_rank_promotion")
    with options.entered():
        jax.config.update("jax_numpy_rank_promotion", "warn")
        try:
            assert (option("numpy_rank_promotion"), option("debug_nans")) == ("warn", True)
        finally:
            jax.config.update("jax_numpy_rank_promotion", before)


def test_a_function_that_was_compiled_is_not_traced_again_in_a_thread():
    traces = []

    @jax.jit
    def double(x):
        traces.append(threading.current_thread().name)
        return 2 * x

    with jax.default_matmul_precision("float32"):
        double(np.ones(2))
        in_thread(in_caller_context(lambda: double(np.ones(2))))
    assert len(traces) == 1


def test_other_processes_get_jax_options_but_none_about_devices(devices):
    with jax.default_device(devices[2]), jax.transfer_guard("disallow"), jax.numpy_dtype_promotion("strict"):
        sent = pickle.dumps(SentContext())
    with pickle.loads(sent).entered():
        assert option("numpy_dtype_promotion") == "strict"
        assert option("default_device") is None and option("transfer_guard") is None


def test_other_processes_get_the_name_of_the_strategy_or_what_stands_in_for_it():
    with state.replaced(strategy=("four", "devices")):
        name, stand_in = (pickle.loads(pickle.dumps(SentContext(strategy))) for strategy in (None, "stand-in"))
    with name.entered():
        assert (state.current().strategy, state.current().strategy_elsewhere) == (None, "('four', 'devices')")
        further = pickle.loads(pickle.dumps(SentContext()))
    with further.entered():
        assert state.current().strategy_elsewhere == "('four', 'devices')"
    with stand_in.entered():
        assert (state.current().strategy, state.current().strategy_elsewhere) == ("stand-in", None)
