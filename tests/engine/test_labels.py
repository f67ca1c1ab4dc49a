"""Labels of variables, which are freed with their variables."""

import gc

import keras

from replicax.engine.labels import Labels


def test_equal_paths_are_numbered_in_order():
    labels = Labels()
    variables = [keras.Variable([1.0], name="v") for _ in range(3)]
    for variable in variables:
        labels.add(variable)
    assert [labels.of(v) for v in variables] == [("v", 0), ("v", 1), ("v", 2)]
    assert labels.find(("v", 1)) is variables[1]
    assert labels.find(("w", 0)) is None


def test_a_freed_variable_leaves_its_number_unused():
    labels = Labels()
    first = keras.Variable([1.0], name="v")
    labels.add(first)
    del first
    gc.collect()
    assert labels.find(("v", 0)) is None
    second = keras.Variable([1.0], name="v")
    labels.add(second)
    assert labels.of(second) == ("v", 1)
    assert [label for label, _ in labels] == [("v", 1)]
