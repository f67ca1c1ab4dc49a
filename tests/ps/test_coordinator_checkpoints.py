"""Checkpoints of optimizers that functions of a `ClusterCoordinator` train with."""

import numpy as np
import pytest

import replicax.testing


def train_and_restore(folder):
    import keras

    import replicax as rx

    keras.utils.set_random_seed(1)
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")

    def trainer():
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.8)
            return model, keras.optimizers.Adam(rate)

    trainers = [trainer(), trainer()]

    def step(number):
        model, optimizer = trainers[number]

        def replica_fn():
            with rx.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(model(x) - 1.0))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        strategy.run(replica_fn)

    def train(number):
        for _ in range(4):
            coordinator.schedule(step, (number,))
        coordinator.join()
        model, optimizer = trainers[number]
        return model.get_weights(), int(optimizer.iterations)

    def checkpoint(number):
        model, optimizer = trainers[number]
        return rx.Checkpoint(model=model, optimizer=optimizer)

    path = f"{folder}/checkpoint"
    found = [train(0)]
    if strategy.is_chief:
        checkpoint(0).write(path)
    found.append(train(0))
    if strategy.is_chief:
        checkpoint(0).restore(path).assert_existing_objects_matched()
    found.append(train(0))
    if strategy.is_chief:  # Before any function trains it.
        checkpoint(1).restore(path).assert_existing_objects_matched()
    found.append(train(1))
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_slots_are_saved_and_restored(tmp_path):
    results = replicax.testing.run(
        train_and_restore,
        tasks={"chief": 1, "worker": 1, "ps": 2},
        args=(str(tmp_path),),
        logical_devices=1,
        deadline_seconds=100,
    )
    first, second, again, other = results["chief:0"].value
    assert [steps for _, steps in (first, second, again, other)] == [4, 8, 8, 8]
    assert np.abs(first[0][0] - second[0][0]).max() > 0.01
    for weights, _ in (again, other):
        for a, b in zip(weights, second[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
