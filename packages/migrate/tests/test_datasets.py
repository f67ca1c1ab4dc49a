"""Datasets of other packages and of Python's generators, ported and read."""

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported, run

from replicax.input.grain_datasets import reshuffled

START = "import tensorflow as tf\nimport tensorflow_datasets as tfds\n"


def test_a_dataset_that_is_made_of_itself_alone_is_ported() -> None:
    text, _ = ported(f"{START}def f(x, y): return x, y\nd = d.map(f).cache()")
    assert "d = d.map(lambda example: f(*example))" in text


def test_an_argument_of_a_function_has_the_name_of_the_one_in_numpy() -> None:
    names = run(
        "import numpy as np\nimport tensorflow as tf\n"
        "d = tf.data.Dataset.from_tensor_slices(np.arange(8)).batch(4)\n"
        "d = d.map(lambda x: tf.reshape(x, shape=[2, 2]))"
    )
    assert [x.shape for x in names["d"]] == [(2, 2), (2, 2)]


@pytest.mark.parametrize("count", ["2", "epochs", "count=1 + 1"])
def test_data_that_are_repeated_a_few_times_end(count: str) -> None:
    made = "import tensorflow as tf\nepochs = 2\nd = tf.data.Dataset.range(4)"
    names = run(f"{made}.repeat({count}).map(lambda x: x).shuffle(9)")
    assert len(names["d"]) == 8
    assert sorted(names["d"]) == [0, 0, 1, 1, 2, 2, 3, 3]


SERIES = """
import numpy as np
import tensorflow as tf
x = np.arange(10, dtype="float32")[:, None]
d = tf.keras.{}.timeseries_dataset_from_array(x[:-2], x[2:, 0], 2, batch_size=4{})
"""


@pytest.mark.parametrize("module", ["preprocessing", "utils"])
def test_windows_of_a_series(module: str) -> None:
    names = run(
        SERIES.format(module, "") + "d = d.map(lambda x, y: (x + 1, y)).cache()"
    )
    batches = list(names["d"])
    assert [x.shape for x, _ in batches] == [(4, 2, 1), (3, 2, 1)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert y.tolist() == [*range(2, 9)]
    assert x[..., 0].tolist() == [[i + 1, i + 2] for i in range(7)]


WINDOWS = """
import numpy as np
import tensorflow as tf
n = 3
def batched(w):
    batch = w.batch(n, drop_remainder=True)
    return batch
d = tf.data.Dataset.from_tensor_slices(tf.range(6))
d = d.window({}
d = d.map(lambda w: (w[:-1], w[-1])).batch(4)
"""
SHIFTED = "n, shift=1, drop_remainder=True)\nd = d"


@pytest.mark.parametrize(
    "windows",
    [
        "n, shift=1).flat_map(lambda w: w.batch(n))",
        "n, 1, 2, True).flat_map(lambda w: w.batch(n))",
        f"{SHIFTED}.flat_map(lambda w: w.batch(n + 1))",
        f"{SHIFTED}.flat_map(lambda w: w.skip(n))",
        f"{SHIFTED}.repeat(2).window({SHIFTED}.flat_map(batched)",
        f"{SHIFTED}.map(batched)",
        f"{SHIFTED}.flat_map(batched) if [*d] else d",
    ],
)
def test_windows_that_are_no_arrays_of_one_size_are_left(windows: str) -> None:
    _, left = ported(WINDOWS.format(windows))
    assert any("like tf.data's" in each for each in left)


def test_windows_in_order_that_are_shuffled_later_are_left() -> None:
    _, left = ported(SERIES.format("utils", "") + "d = d.shuffle(9)")
    assert "pass `shuffle=True`" in left[0]
    assert len(left) == 1
    run(SERIES.format("utils", ", shuffle=True") + "d = d.shuffle(9)")


def test_images_in_maps_are_resized_and_flipped_as_tensorflow_does() -> None:
    names = run(
        "import numpy as np\nimport tensorflow as tf\n"
        "images = np.arange(12, dtype='uint8').reshape(1, 2, 6, 1)\n"
        "def f(x):\n"
        "    x = tf.image.resize(x * 2, [2, 3])\n"
        "    return tf.image.flip_up_down(tf.image.flip_left_right(x))\n"
        "d = tf.data.Dataset.from_tensor_slices(images).map(f)"
    )
    (image,) = names["d"]
    assert image.dtype == np.dtype("float32")
    # What TensorFlow 2.21 gives.
    assert image[..., 0].tolist() == [[21.0, 17.0, 13.0], [9.0, 5.0, 1.0]]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("tf.image.resize(x, [2, 2], method='area')", "area, gaussian and mitche"),
        ("tf.compat.v1.image.resize(x, [2, 2])", "it samples other pixels"),
        ("tf.image.random_jpeg_quality(x, 75, 95)", "has no counterpart in NumPy"),
        ("tf.random.uniform([], 1, dtype=tf.int32) * x", "pass its argument 'maxval'"),
        ("tf.random.uniform([], 0, 9, dtype=x.dtype)", "pass a literal dtype"),
    ],
)
def test_other_functions_of_images_are_left(call: str, reason: str) -> None:
    data = "tf.data.Dataset.from_tensor_slices(images)"
    text, left = ported(f"import tensorflow as tf\nd = {data}.map(lambda x: {call})")
    assert any(reason in each for each in left)
    assert call in text


RANDOM = """
import numpy as np
import tensorflow as tf
images, labels = np.ones((64, 2, 2, 3), "uint8"), np.arange(64)
def color(x):
    return tf.image.random_brightness(x, 0.2, seed=3)
def augment(x, y):
    x = tf.image.convert_image_dtype(x, tf.float32)
    if tf.random.uniform([]) > 0.5:
        x = color(x) + tf.random.normal([2, 2, 3], stddev=0.1)
    return x, y
d = tf.data.Dataset.from_tensor_slices((images, labels)).map(augment)
d = d.map(lambda x, y: (tf.image.random_crop(x, [2, 1, 3]), y))
"""


def test_functions_of_maps_draw_random_numbers_of_each_example() -> None:
    names = run(RANDOM)
    examples = list(names["d"])
    assert [y for _, y in examples] == [*range(64)]
    assert {(x.shape, x.dtype.name) for x, _ in examples} == {((2, 1, 3), "float32")}
    changed = {x[0, 0, 0] for x, _ in examples} - {np.float32(1 / 255)}
    assert 16 < len(changed) < 48
    again = [x.tolist() for x, _ in names["d"]]
    assert again == [x.tolist() for x, _ in examples]
    later = [x.tolist() for x, _ in list(names["d"].repeat(2))[64:]]
    assert later != again


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("print(augment(images[0], 0))", "is also used outside of `map`"),
        ("f = functools.partial(augment)", "is also used outside of `map`"),
        (
            "def augment(x, y, rate=0.1):\n    return tf.random.normal([]) * x, y\n"
            "e = tf.data.Dataset.from_tensor_slices((images, labels)).map(augment)",
            "has optional arguments",
        ),
    ],
)
def test_functions_that_cannot_get_a_generator_stay(more: str, reason: str) -> None:
    text, left = ported(f"{RANDOM}{more}")
    assert any(reason in each for each in left)
    assert "tf.image.random_brightness(x, 0.2, seed=3)" in text


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("point_dtype", "float32"), ("ID", "int32"), ("np.int64", "int64")],
)
def test_numbers_are_drawn_as_their_dtype_says(dtype: str, expected: str) -> None:
    names = run(
        "import numpy as np\nimport tensorflow as tf\n"
        "point_dtype, ID = tf.float32, tf.int32\nd = tf.data.Dataset.range(64)\n"
        f"d = d.map(lambda x: tf.random.uniform([], -3, 3, dtype={dtype}))"
    )
    drawn = np.array(list(names["d"]))
    assert drawn.dtype == expected
    is_whole = expected.startswith("int")
    assert (set(drawn.tolist()) == {-3, -2, -1, 0, 1, 2}) == is_whole


def test_the_generator_has_a_name_that_is_free() -> None:
    names = run(f"rng = generator = example_rng = 1{RANDOM}")
    assert len(list(names["d"])) == 64


LOOPS = """
import tensorflow as tf
d = tf.data.Dataset.range(8).shuffle(8).batch(4)
plain = tf.data.Dataset.range(4)
def read(dataset):
    return [[int(x) for x in batch] for batch in dataset]
seen, first, numbers = [], [], []
for epoch in range(3):
    seen.append(read(d))
    for batch in d.take(1):
        first.append([int(x) for x in batch])
    for i, batch in d.enumerate():
        numbers.append(int(i))
    for x in plain:
        numbers.append(int(x))
"""


def test_loops_through_shuffled_datasets_have_an_order_of_their_own_each() -> None:
    names = run(LOOPS)
    assert all(sorted(a + b) == list(range(8)) for a, b in names["seen"])
    assert len({str(each) for each in names["seen"] + names["first"]}) == 6
    assert names["numbers"] == [0, 1, 0, 1, 2, 3] * 3
    text, _ = ported(LOOPS)
    assert "for x in plain:" in text
    kept = LOOPS.replace("shuffle(8)", "shuffle(8, reshuffle_each_iteration=False)")
    assert len({str(each) for each in run(kept)["seen"]}) == 1


@pytest.mark.parametrize("given", ["read()[0]", "both['train']", "data"])
def test_shuffled_datasets_are_found_in_parts_of_results(given: str) -> None:
    text, _ = ported(
        "import tensorflow as tf\ndef read():\n"
        "    d = tf.data.Dataset.range(8).shuffle(8).batch(4)\n    return d, 2\n"
        "data, n = read()\nboth = {'train': data}\n"
        f"for _ in range(n):\n    for x in {given}: print(x)"
    )
    assert f"for x in rx.input.next_epoch({given}): print(x)" in text


def test_a_loop_that_runs_once_stays() -> None:
    start = "import tensorflow as tf\nd = tf.data.Dataset.range(8).shuffle(8)\n"
    text, left = ported(f"{start}for x in d.take(1): print(x.shape)")
    assert "for x in d[:1]: print(x.shape)" in text
    assert not left


LOOKUP = """
import numpy as np
import tensorflow as tf
words = np.array([["b", "x"], ["a", "b"]])
lookup = tf.keras.layers.StringLookup(vocabulary={})
d = tf.data.Dataset.from_tensor_slices(words).map(lambda x: lookup(x))
"""


def test_words_in_sight_are_looked_up_outside_of_pipelines() -> None:
    names = run(
        "import tensorflow as tf\n"
        "lookup = tf.keras.layers.StringLookup(vocabulary=['a', 'b'])\n"
        "x, y = lookup(tf.constant(['b', 'c'])), lookup([['a']])"
    )
    assert (names["x"].tolist(), names["y"].tolist()) == ([2, 0], [[1]])


def test_what_a_layer_of_tensorflow_is_given_stays_with_it() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "def lower(x): return tf.strings.lower(x)\n"
        "layer = tf.keras.layers.TextVectorization(standardize=lower)\n"
        "d = tf.data.Dataset.from_tensor_slices(texts).batch(2)\n"
        "layer.adapt(d)\n"
        "d = d.map(lambda x: layer(tf.expand_dims(x, -1)))"
    )
    assert "return tf.strings.lower(x)" in text
    assert "d.map(lambda x: layer(tf.expand_dims(x, -1)))" in text
    assert ["uses `layer`, which needs TensorFlow" in each for each in left] == [0, 1]


def test_words_are_looked_up_as_tensorflow_does() -> None:
    names = run(LOOKUP.format("['a', 'b'], mask_token=None"))
    examples = list(names["d"])
    # What TensorFlow 2.21 gives.
    assert [x.tolist() for x in examples] == [[2, 0], [1, 2]]
    assert {x.dtype for x in examples} == {np.dtype("int64")}


def test_indices_start_at_zero_where_no_other_words_are_allowed() -> None:
    words = "['x', 'b', 'a']"
    names = run(LOOKUP.format(f"{words}, num_oov_indices=0, mask_token=None"))
    assert [x.tolist() for x in names["d"]] == [[1, 0], [2, 1]]
    unknown = run(LOOKUP.format("['a', 'b'], num_oov_indices=0"))["d"]
    with pytest.raises(KeyError, match="x"):  # TensorFlow refuses it, too.
        list(unknown)


@pytest.mark.parametrize(
    "source",
    [
        LOOKUP.format("'words.txt'"),
        LOOKUP.format("['a'], num_oov_indices=2"),
        LOOKUP.format("['a']") + "print(lookup(words))",
        LOOKUP.format("['a']") + "print(lookup.vocabulary_size())",
        LOOKUP.format("['a']") + "if x: lookup = f",
    ],
)
def test_other_lookups_are_left(source: str) -> None:
    text, left = ported(source)
    assert any("is made with TensorFlow" in each for each in left)
    assert "lookup = tf.keras.layers.StringLookup(" in text


DRAWN = """
import numpy as np
import tensorflow as tf
def draw(x): return x + tf.random.uniform([])
def made(source):
    {}
d = made(tf.data.Dataset.from_tensor_slices(np.zeros(64, "float32"))).batch(4)
"""


@pytest.mark.parametrize(
    ("body", "is_kept"),
    [
        ("return source.map(draw).cache()", True),
        ("return source.map(draw).shuffle(9).cache().repeat(1)", True),
        ("d = source.map(draw)\n    return d.cache()", True),
        ("def f(): return source.map(draw)\n    return f().batch(2).cache()", True),
        ("return source.cache().map(draw)", False),
        ("return source.map(draw).cache().map(draw)", False),
        ("return source.map(draw).cache().shuffle(9)", None),
        ("return source.shuffle(9).cache().map(lambda x: x + 1)", True),
    ],
)
def test_a_cache_keeps_what_was_drawn_before_it(
    body: str, is_kept: bool | None
) -> None:
    data = run(DRAWN.format(body))["d"]
    first, second = (
        np.ravel([*map(np.asarray, reshuffled(data, epoch))]) for epoch in range(2)
    )
    assert np.array_equal(first, second) == bool(is_kept)
    if is_kept is None:
        assert np.array_equal(np.sort(first), np.sort(second))


def test_a_cache_of_random_numbers_in_a_stream_is_left() -> None:
    drawing = "def f(x, y): return x + tf.random.uniform([]), y\nd = d.map(f).cache()"
    _, left = ported(SERIES.format("utils", "") + drawing)
    assert "put `cache` before that `map`" in left[0]


@pytest.mark.parametrize("made", ["Pool(2)", "ThreadPoolExecutor()"])
def test_a_map_of_processes_is_none_of_a_dataset(made: str) -> None:
    drawn = DRAWN.format("return source.map(draw)")
    _, left = ported(drawn + f"with {made} as p: xs = p.map(draw, [1.0])")
    assert "outside of `map`" in left[0]


def test_datasets_that_methods_and_properties_return_are_ported() -> None:
    text, left = ported(
        "import numpy as np\nimport tensorflow as tf\n"
        "class Window:\n"
        "    def make(self, data):\n"
        "        return tf.data.Dataset.from_tensor_slices(data).batch(2)\n"
        "    @property\n"
        "    def train(self):\n"
        "        return self.make(np.arange(6))\n"
        "window = Window()\n"
        "one = [b.tolist() for b in window.train.take(1)]\n"
        "two = [b.tolist() for b in window.make(np.arange(8)).skip(2)]"
    )
    assert left == []
    names = executed(text)
    assert names["one"] == [[0, 1]]
    assert names["two"] == [[4, 5], [6, 7]]


def test_methods_of_other_objects_with_a_name_of_a_dataset_stay() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Stock:\n"
        "    @property\n"
        "    def shelf(self):\n"
        "        return self\n"
        "    def take(self, n):\n"
        "        return n\n"
        "x = tf.abs(Stock().shelf.take(1))"
    )
    assert left == []
    assert ".shelf.take(1)" in text


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("next(d.as_numpy_iterator())", [0, 1]),
        ("[list(b) for b in d.as_numpy_iterator()][1]", [2, 3]),
        ("list(d.as_numpy_iterator())[1]", [2, 3]),
        ("next(x for x in d.as_numpy_iterator())", [0, 1]),
    ],
)
def test_iterators_of_numpy_arrays(use: str, expected: list[int]) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        f"d = tf.data.Dataset.range(4).batch(2)\nfound = list({use})\n"
        "it = d.as_numpy_iterator()\nsecond = [list(next(it)) for _ in range(2)][1]"
    )
    assert left == []
    names = executed(text)
    assert names["found"] == expected
    assert names["second"] == [2, 3]


LOOP = """\
import tensorflow as tf
def made(n: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(n)
found = []
for i, x in made(3).repeat().take(4).enumerate():
    found.append((i, int(x)))
"""


def test_a_loop_over_a_numbered_dataset() -> None:
    assert run(LOOP)["found"] == [(0, 0), (1, 1), (2, 2), (3, 0)]


def test_numbered_examples_outside_of_a_loop_stay() -> None:
    text, left = ported(f"{START}d = tf.data.Dataset.range(3).enumerate()")
    assert any("no `enumerate`" in each for each in left)
    assert "tf.data.Dataset.range(3).enumerate()" in text


def test_a_dataset_as_a_type() -> None:
    text, _ = ported(LOOP)
    assert "def made(n: int) -> grain.MapDataset | grain.IterDataset:" in text
    text, _ = ported(LOOP.replace(".take(4)", ".window(4)"))
    assert "def made(n: int) -> tf.data.Dataset:" in text


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("n = images.cardinality()", "no `cardinality`: count the files"),
        ("n = examples.reduce(0, f)", "Grain's datasets have no `reduce`"),
    ],
)
def test_what_grain_does_not_know_of_a_dataset_is_left(
    statement: str, reason: str
) -> None:
    start = (
        "import tensorflow as tf\n"
        "examples = tf.data.Dataset.range(4).batch(2)\n"
        "images = tf.keras.utils.image_dataset_from_directory('d')\n"
        "@tf.function(input_signature=[examples.element_spec])\n"
        "def f(x): return x\n"
        "n = len(examples) + examples.cardinality().numpy()\n"
        "m = tf.data.experimental.cardinality(examples) // 2\n"
    )
    text, left = ported(start)
    assert left == []
    assert "n = len(examples) + keras.ops.convert_to_numpy(len(examples))\n" in text
    assert "m = len(examples) // 2\n" in text
    text, left = ported(start + statement)
    assert [each for each in left if reason in each], left


@pytest.mark.parametrize(
    "tensors",
    [
        "dict(x=rows, y=labels)",
        "(rows, labels)",
        "pair",
        "named",
        "dict(named)",
        "read()",
        "(first, second)",
        "tensors=(given(rows), labels)",
    ],
)
def test_lists_that_are_tensors_become_arrays(tensors: str) -> None:
    names = run(
        "import tensorflow as tf\nrows, labels = [], []\nfor i in range(3):\n"
        "    rows.append([1.0, 2.0 * i])\n    labels.append(i)\n"
        "pair = rows, labels\nnamed = {'x': rows, 'y': labels}\n"
        "def read():\n    x = list(rows)\n    return x, [i for i in labels]\n"
        "def given(x): return x\nfirst, second = read()\n"
        f"d = tf.data.Dataset.from_tensor_slices({tensors})"
    )
    parts = [list(x.values() if isinstance(x, dict) else x) for x in names["d"]]
    assert [x.tolist() for x, _ in parts] == [[1.0, 0.0], [1.0, 2.0], [1.0, 4.0]]
    assert [int(y) for _, y in parts] == [0, 1, 2]


def test_a_dataset_that_a_loop_joins_with_itself() -> None:
    text, left = ported(
        "import tensorflow as tf\nd = tf.data.Dataset.range(2)\nfor n in range(2):\n"
        "    d = tf.data.Dataset.range(n + 1).concatenate(d)"
    )
    assert left == []
    assert (
        "d = grain.MapDataset.concatenate([grain.MapDataset.range(n + 1), d])" in text
    )
