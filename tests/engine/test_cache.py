"""How often functions are traced and compiled, and what the cache keeps."""

import functools
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.conftest import mirrored, values_of

import replicax as rx
from replicax._util.user_code import describe
from replicax.engine.cache import (
    ProgramCache,
    function_key,
)

_compilations: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def listener() -> None:
    def on_event(event: str, duration_s: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _compilations.append(kwargs.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(on_event)


class Count:
    """Counts the compilations of replica programs since it was created."""

    def __init__(self) -> None:
        self._before = len(_compilations)

    def __call__(self) -> int:
        return sum("program" in name for name in _compilations[self._before :])


@pytest.fixture(params=["mirrored", "one", "default"])
def strategy(request: pytest.FixtureRequest) -> Iterator[rx.Strategy]:
    match request.param:
        case "mirrored":
            yield mirrored(2)
        case "one":
            yield rx.OneDeviceStrategy("cpu:1")
        case _:
            default = rx.get_strategy()
            default.runner.programs._entries.clear()
            yield default


def sizes(strategy: rx.Strategy) -> list[int]:
    """XLA programs behind each of the strategy's programs."""
    return [p._jitted._cache_size() for p in strategy.runner.programs]


def test_the_counter_counts() -> None:
    count = Count()
    strategy = mirrored(2)
    for n in (1, 2, 1):
        strategy.run(lambda x: x * 2.0, (np.zeros(n),))
    assert count() == 2


def test_training_step_compiles_once(strategy) -> None:
    if type(strategy) in (rx.MirroredStrategy, rx.OneDeviceStrategy):
        with strategy.scope():
            model, optimizer, metric = _model()
    else:
        model, optimizer, metric = _model()
    traces = []

    def step(x: Any, y: Any) -> Any:
        traces.append(1)
        with rx.GradientTape() as tape:
            loss = keras.ops.mean((model(x) - y) ** 2)
        optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )
        metric.update_state(loss)
        return loss

    n = strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(4 * n, 3)).astype("float32")

    def batches() -> Iterator[Any]:
        # Host arrays, arrays on a device and on the replicas: all the same program.
        host = rx.PerReplica(x.reshape(n, 4, 3)), rx.PerReplica(np.ones((n, 4, 1), "f"))
        yield host
        yield host
        yield jax.tree.map(jnp.asarray, host)
        yield jax.tree.map(lambda a: jax.device_put(a, jax.devices()[0]), host)
        yield from strategy.experimental_distribute_dataset(
            (x, np.ones((4 * n, 1), "float32")), batch_size=4 * n
        )
        yield next(
            iter(
                strategy.distribute_datasets_from_function(
                    lambda _: [(x[:4], x[:4, :1])] * n
                )
            )
        )

    for i, batch in enumerate(batches()):
        if i == 1:
            count, num_traces = Count(), len(traces)
        strategy.run(step, batch)
    assert i == 5
    assert sizes(strategy) == [1]
    assert len(traces) == num_traces
    assert count() == 0


def _model() -> Any:
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    return model, keras.optimizers.Adam(), keras.metrics.Mean()


def test_a_variable_assigned_outside_does_not_compile_again(strategy) -> None:
    with strategy.scope():
        w, b = keras.Variable([1.0, 2.0]), keras.Variable(0.0)

    def step() -> Any:
        w.assign_add(w * b)
        return w.value

    strategy.run(step)
    w.assign([3.0, 4.0])
    b.assign(jnp.float32(2.0))
    np.testing.assert_allclose(values_of(strategy.run(step))[0], [9.0, 12.0])
    w.assign(np.float32([1.0, 1.0]))
    strategy.run(step)
    w.assign(jax.device_put(np.float32([1.0, 1.0]), jax.devices()[-1]))
    strategy.run(step)
    assert sizes(strategy) == [1]


def test_changing_numbers_do_not_compile_again(strategy) -> None:
    def fn(i: Any, x: Any, *, c: Any) -> Any:
        return i + x * c

    for i in range(4):
        out = strategy.run(fn, (i, 0.5 * i), {"c": 1j * i})
        np.testing.assert_allclose(np.asarray(out), i + 0.5j * i * i)
    for i in range(4):
        strategy.run(fn, (np.int32(i), np.float32(i)), {"c": np.complex64(i)})
    # Python numbers have other promotion rules than NumPy's, so a program of their own.
    assert sizes(strategy) == [1, 1]


def test_new_shape_dtype_and_structure_compile_anew_and_old_ones_stay(strategy) -> None:
    def fn(x: Any) -> Any:
        return jax.tree.map(lambda a: a + 1, x)

    arguments = [
        np.zeros(2, "float32"),
        np.zeros(3, "float32"),
        np.zeros(3, "int32"),
        (np.zeros(3, "int32"),),
        {"a": np.zeros(3, "int32")},
        {"b": np.zeros(3, "int32")},
    ]
    for x in [*arguments, *arguments]:
        strategy.run(fn, (x,))
    assert sizes(strategy) == [1] * len(arguments)


def test_bound_methods_share_a_program_per_object(strategy) -> None:
    class Scaler:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def step(self, x: Any) -> Any:
            return self.scale * x

        def __call__(self, x: Any) -> Any:
            return -self.scale * x

    two, three = Scaler(2.0), Scaler(3.0)
    for _ in range(3):
        assert values_of(strategy.run(two.step, (1.0,)))[0] == 2.0
        assert values_of(strategy.run(three.step, (1.0,)))[0] == 3.0
    assert sizes(strategy) == [1, 1]
    for _ in range(3):
        assert values_of(strategy.run(two, (1.0,)))[0] == -2.0
    assert sizes(strategy) == [1, 1, 1]


def test_partial_with_changing_numbers_shares_a_program(strategy) -> None:
    def fn(a: Any, b: Any, c: Any = 0.0) -> Any:
        return a + 10 * b + 100 * c

    for i in range(4):
        inner = functools.partial(fn, float(i), c=float(i))
        assert values_of(strategy.run(functools.partial(inner, 1.0)))[0] == 101 * i + 10
        assert values_of(strategy.run(inner, (1.0,), {"c": 2.0}))[0] == i + 210
    assert sizes(strategy) == [1]


def test_changing_closed_over_values_compile_again(strategy) -> None:
    def make(learning_rate: float, unchanged: float) -> Any:
        return lambda x, k=learning_rate: x * learning_rate + k + unchanged

    for i in range(4):
        out = strategy.run(make(float(i), 1.0), (2.0,))
        assert values_of(out)[0] == 3.0 * i + 1
    assert sizes(strategy) == [1] * 4


def test_a_closed_over_value_that_is_assigned_again_compiles_again(strategy) -> None:
    scale = 2.0

    def fn(x: Any) -> Any:
        return scale * x

    assert values_of(strategy.run(fn, (1.0,)))[0] == 2.0
    scale = 3.0
    assert values_of(strategy.run(fn, (1.0,)))[0] == 3.0


CELL = """
import jax.numpy as jnp
import keras
import replicax as rx

with strategy.scope():
    counter = keras.Variable(0.0, aggregation="mean", trainable=False)

def increment():
    return rate

def step():
    counter.assign_add(increment())

for _ in range(2):
    strategy.run(step)
"""


def test_a_cell_of_a_notebook_that_runs_again_has_its_own_variables(strategy) -> None:
    # Code and module are the same, but the names refer to other objects.
    namespace = {"strategy": strategy, "rate": 1.0}
    code = compile(CELL, "<cell>", "exec")
    exec(code, namespace)
    first = namespace["counter"]
    exec(code, namespace)
    second = namespace["counter"]
    assert (float(first.value), float(second.value)) == (2.0, 2.0)
    namespace["rate"] = 10.0  # A global of a function that the step calls.
    strategy.run(namespace["step"])
    assert (float(first.value), float(second.value)) == (2.0, 12.0)


def test_a_global_that_is_assigned_later_compiles_again(strategy) -> None:
    namespace: dict[str, Any] = {}
    text = "def f(x): return x * (later if 'later' in globals() else 1.0)"
    for value in (None, 2.0, 3.0):
        if value is not None:
            namespace["later"] = value
        exec(text, namespace)
        out = strategy.run(namespace["f"], (1.0,))
        assert values_of(out)[0] == (value or 1.0)


def test_keys_of_functions_that_call_each_other() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(): return g()\ndef g(): return f() + [x for x in y]", namespace)
    key = function_key(namespace["f"])
    assert key == function_key(namespace["f"])
    namespace["y"] = 1
    assert key != function_key(namespace["f"])
    bare = function_key(namespace["f"], with_globals=False)
    namespace["y"] = 2
    assert bare == function_key(namespace["f"], with_globals=False)


def test_functions_that_have_run_can_be_wrapped_and_pickled(strategy) -> None:
    def fn(x: Any) -> Any:
        return x + one

    one = 1.0
    assert values_of(strategy.run(fn, (1.0,)))[0] == 2.0
    state = pickle.loads(pickle.dumps(vars(fn)))  # As cloudpickle does.
    assert list(state.values()) == [None]

    @functools.wraps(fn)
    def other(x: Any) -> Any:
        return 10.0 * fn(x)

    assert values_of(strategy.run(other, (1.0,)))[0] == 20.0


def test_constants_of_other_types_have_programs_of_their_own(strategy) -> None:
    seen = []

    def fn(flag: Any) -> Any:
        seen.append(flag)
        return 0.0

    for flag in (True, "1", b"1", None, False, True):
        strategy.run(fn, (flag,))
    assert len(sizes(strategy)) == 5
    assert seen[0] is True


def test_cache_is_bounded_and_drops_the_least_recently_used() -> None:
    cache = ProgramCache(size=3)
    made: list[int] = []

    def make(i: int) -> Any:
        return lambda: made.append(i) or f"program {i}"

    def fn() -> None:
        pass

    for i in (0, 1, 2, 0, 3, 0, 2):
        assert cache.get(fn, i, make(i)) == f"program {i}"
    assert made == [0, 1, 2, 3]
    assert len(cache) == 3
    cache.get(fn, 1, make(1))
    assert made == [0, 1, 2, 3, 1]


def test_strategy_and_model_are_freed() -> None:
    def train() -> list[weakref.ref[Any]]:
        strategy = mirrored(2)
        with strategy.scope():
            w = keras.Variable(1.0)

        def step() -> Any:
            w.assign_add(1.0)
            return w.value

        strategy.run(step)
        return [weakref.ref(strategy), weakref.ref(w)]

    refs = train()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_failed_trace_is_not_cached() -> None:
    strategy = mirrored(2)
    fail = True

    class Switch:
        def step(self) -> Any:
            if fail:
                raise OSError("no data")
            return 1.0

    switch = Switch()
    with pytest.raises(OSError, match="no data"):
        strategy.run(switch.step)
    assert len(strategy.runner.programs) == 0
    fail = False
    assert values_of(strategy.run(switch.step)) == (1.0, 1.0)


def test_helpers_made_in_a_loop_share_a_program(strategy) -> None:
    """Functions inside functions, one of which calls itself."""
    table = {"scale": 2.0}

    def epoch() -> Any:
        def scaled(x: Any) -> Any:
            return table["scale"] * x

        def loss_fn(x: Any, depth: int = 2) -> Any:
            return loss_fn(x, depth - 1) if depth else scaled(x)

        return strategy.run(lambda x: loss_fn(x), (3.0,))

    for _ in range(4):
        assert values_of(epoch())[0] == 6.0
    assert sizes(strategy) == [1]


def test_assigned_python_numbers_do_not_compile_again(strategy) -> None:
    with strategy.scope():
        a, b = keras.Variable(0.0), keras.Variable(0.0)

    def step(x: Any) -> None:
        a.assign(1.0)
        b.assign_add(x)

    for i in range(3):
        strategy.run(step, (np.float32(1.0),))
        if i == 1:
            b.assign(7.0)
    assert (float(a.value), float(b.value)) == (1.0, 8.0)
    assert sizes(strategy) == [1]


def test_function_keys() -> None:
    def make(x: Any) -> Any:
        return lambda: x

    marker = object()
    assert function_key(make(marker)) == function_key(make(marker))
    assert function_key(make(marker)) != function_key(make(object()))
    assert function_key(make(1)) != function_key(make(True))
    assert function_key(make(1.0)) != function_key(make(1))
    assert function_key(make(0.0)) != function_key(make(-0.0))
    assert function_key(make(float("nan"))) == function_key(make(float("nan")))
    assert function_key(make(0j)) != function_key(make(-0j))
    assert function_key(len) == function_key(len)
    assert function_key(len) != function_key(max)


def test_key_of_an_unbound_cell() -> None:
    def make() -> Any:
        def fn() -> Any:
            return later

        key = function_key(fn)
        later = 1.0
        return key, function_key(fn)

    before, after = make()
    assert before != after


def test_describe_names_the_function_and_its_line() -> None:
    line = test_describe_names_the_function_and_its_line.__code__.co_firstlineno
    assert describe(test_describe_names_the_function_and_its_line).endswith(
        f"(line {line})"
    )
    assert describe(len) == "len"
    assert "partial" in describe(functools.partial(len))


def test_a_counter_of_traces_does_not_compile_each_call_again() -> None:
    strategy = mirrored(2)
    num_traces = 0

    def step(x: jax.Array) -> jax.Array:
        nonlocal num_traces
        num_traces += 1
        return x * 2

    for _ in range(4):
        strategy.run(step, (1.0,))
    assert num_traces == 2, "one trace to discover and one to compile"
