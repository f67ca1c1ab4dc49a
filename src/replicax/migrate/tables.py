"""Tables of names: what `tf.X` is called here, and why some names stay.

All paths are those under `tensorflow`, without `compat.v1`. Targets begin with `rx`,
`keras`, `np`, `jax`, `grain`, `os`, `shutil`, `logging` or `absl`.
"""

__all__ = [
    "ALIASES",
    "DROPPED",
    "DTYPES",
    "EXACT",
    "FOREIGN",
    "NEED_TENSORFLOW",
    "NOTES",
    "OLD_PREFIXES",
    "PREFIXES",
    "REASONS",
]

ALIASES = {
    "rx": "replicax",
    "keras": "keras",
    "np": "numpy",
    "jax": "jax",
    "grain": "grain",
    "os": "os",
    "shutil": "shutil",
    "logging": "logging",
    "absl": "absl",
}
"""The name under which a target begins, and the module that has it."""

OLD_PREFIXES = {
    "compat.v1.": "",
    "compat.v2.": "",
    "contrib.distribute.": "distribute.",
    "contrib.feature_column.": "feature_column.",
    "contrib.data.": "data.experimental.",
    "contrib.cluster_resolver.": "distribute.cluster_resolver.",
    "contrib.tpu.TPUClusterResolver": "distribute.cluster_resolver.TPUClusterResolver",
    "python.keras.": "keras.",
    "_api.v2.": "",
}
"""Where names stood before."""

_DTYPE_NAMES = """
float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32
uint64 bool complex64 complex128
"""
DTYPES = frozenset(_DTYPE_NAMES.split())

_OPTIMIZERS = {
    f"keras.optimizers.{kind}.{name}": f"keras.optimizers.{name}"
    for kind in ("legacy", "experimental")
    for name in [
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "Ftrl",
        "Nadam",
        "RMSprop",
        "SGD",
    ]
}
_REDUCTION = {
    "NONE": "None",
    "SUM": '"sum"',
    "SUM_OVER_BATCH_SIZE": '"sum_over_batch_size"',
    "AUTO": '"sum_over_batch_size"',
}
_AGGREGATION = {
    "NONE": '"none"',
    "SUM": '"sum"',
    "MEAN": '"mean"',
    "ONLY_FIRST_REPLICA": '"only_first_replica"',
}
_SYNCHRONIZATION = {
    "AUTO": '"auto"',
    "NONE": '"none"',
    "ON_WRITE": '"on_write"',
    "ON_READ": '"on_read"',
}
_ERRORS = {
    "mean_squared_error": ("mse", "MSE"),
    "mean_absolute_error": ("mae", "MAE"),
    "mean_squared_logarithmic_error": ("msle", "MSLE"),
}
_HOOK_NAMES = """
CheckpointSaverListener LoggingTensorHook NanLossDuringTrainingError
NanTensorHook SessionRunArgs SessionRunContext SessionRunHook SessionRunValues
StepCounterHook StopAtStepHook
"""
_HOOKS = _HOOK_NAMES.split()
EXACT = {
    "GradientTape": "rx.GradientTape",
    **{
        f"config.{module}list_{kind}_devices": f"rx.config.list_{kind}_devices"
        for module in ("", "experimental.")
        for kind in ("physical", "logical")
    },
    "train.Checkpoint": "rx.Checkpoint",
    "train.CheckpointManager": "rx.CheckpointManager",
    "train.latest_checkpoint": "rx.latest_checkpoint",
    "train.ClusterSpec": "rx.ClusterSpec",
    "train.get_global_step": "rx.estimator.get_global_step",
    "train.get_or_create_global_step": "rx.estimator.get_global_step",
    **{f"train.{name}": f"rx.estimator.{name}" for name in _HOOKS},
    **{f"estimator.{name}": f"rx.estimator.{name}" for name in _HOOKS},
    "estimator.inputs.numpy_input_fn": "rx.estimator.numpy_input_fn",
    "estimator.inputs.pandas_input_fn": "rx.estimator.pandas_input_fn",
    "estimator.export.build_raw_serving_input_receiver_fn": (
        "rx.estimator.build_raw_serving_input_receiver_fn"
    ),
    "estimator.export.ServingInputReceiver": "rx.estimator.ServingInputReceiver",
    "keras.estimator.model_to_estimator": "rx.estimator.model_to_estimator",
    "distribute.CentralStorageStrategy": "rx.CentralStorageStrategy",
    "distribute.coordinator.ClusterCoordinator": "rx.ClusterCoordinator",
    "distribute.experimental.coordinator.ClusterCoordinator": "rx.ClusterCoordinator",
    "distribute.coordinator.RemoteValue": "rx.RemoteValue",
    "distribute.experimental.coordinator.RemoteValue": "rx.RemoteValue",
    "distribute.coordinator.PerWorkerValues": "rx.PerWorkerValues",
    "distribute.experimental.coordinator.PerWorkerValues": "rx.PerWorkerValues",
    "distribute.DistributedValues": "rx.PerReplica",
    "data.experimental.AutoShardPolicy": "rx.AutoShardPolicy",
    "keras.callbacks.BackupAndRestore": "rx.BackupAndRestore",
    "keras.callbacks.experimental.BackupAndRestore": "rx.BackupAndRestore",
    "keras.callbacks.TensorBoard": "rx.callbacks.TensorBoard",
    "keras.utils.SidecarEvaluator": "rx.SidecarEvaluator",
    "keras.experimental.SidecarEvaluator": "rx.SidecarEvaluator",
    "keras.layers.DenseFeatures": "rx.feature_column.DenseFeatures",
    "keras.mixed_precision.experimental.set_policy": (
        "keras.mixed_precision.set_global_policy"
    ),
    "keras.mixed_precision.experimental.Policy": "keras.mixed_precision.Policy",
    "keras.mixed_precision.experimental.LossScaleOptimizer": (
        "keras.mixed_precision.LossScaleOptimizer"
    ),
    "keras.preprocessing.image_dataset_from_directory": (
        "keras.utils.image_dataset_from_directory"
    ),
    "zeros_initializer": "keras.initializers.Zeros",
    "ones_initializer": "keras.initializers.Ones",
    "constant_initializer": "keras.initializers.Constant",
    "glorot_uniform_initializer": "keras.initializers.GlorotUniform",
    "glorot_normal_initializer": "keras.initializers.GlorotNormal",
    "VERSION": "keras.__version__",
    "version.VERSION": "keras.__version__",
    "io.gfile.rmtree": "shutil.rmtree",
    "gfile.DeleteRecursively": "shutil.rmtree",
    **{
        f"keras.{module}.{short}": f"keras.{module}.{name}"
        for module in ("losses", "metrics")
        for name, shorts in _ERRORS.items()
        for short in shorts
    },
    "Variable": "keras.Variable",
    "Tensor": "jax.Array",
    "Module": "keras.layers.Layer",
    "name_scope": "keras.name_scope",
    "initializers": "keras.initializers",
    "optimizers": "keras.optimizers",
    "math.pi": "np.pi",
    "newaxis": "None",
    "compat.as_str_any": "str",
    "errors.OutOfRangeError": "StopIteration",
    "app.run": "absl.app.run",
    "app.flags": "absl.flags",
    "flags": "absl.flags",
    "gfile.Exists": "os.path.exists",
    "io.gfile.exists": "os.path.exists",
    "io.gfile.isdir": "os.path.isdir",
    "gfile.IsDirectory": "os.path.isdir",
    "io.gfile.listdir": "os.listdir",
    "gfile.ListDirectory": "os.listdir",
    "io.gfile.remove": "os.remove",
    "io.gfile.GFile": "open",
    "gfile.GFile": "open",
    "gfile.Open": "open",
    "logging.info": "logging.info",
    "logging.warn": "logging.warning",
    "logging.warning": "logging.warning",
    "logging.error": "logging.error",
    "logging.debug": "logging.debug",
    "__version__": "keras.__version__",
    **_OPTIMIZERS,
    **{f"keras.losses.Reduction.{k}": v for k, v in _REDUCTION.items()},
    **{f"losses.Reduction.{k}": v for k, v in _REDUCTION.items()},
    **{f"VariableAggregation.{k}": v for k, v in _AGGREGATION.items()},
    **{f"VariableSynchronization.{k}": v for k, v in _SYNCHRONIZATION.items()},
}
"""Names one by one."""

PREFIXES = {
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.optimizers.schedules": "keras.optimizers.schedules",
    "keras": "keras",
    "distribute.experimental": "rx.experimental",
    "distribute.cluster_resolver": "rx.cluster_resolver",
    "distribute": "rx",
    "estimator": "rx.estimator",
    "feature_column": "rx.feature_column",
    "tpu.experimental": "rx.tpu.experimental",
    "optimizers": "keras.optimizers",
    "losses": "keras.losses",
    "metrics": "keras.metrics",
    "initializers": "keras.initializers",
    "flags": "absl.flags",
    "app.flags": "absl.flags",
    "config.experimental_connect_to_cluster": (
        "rx.config.experimental_connect_to_cluster"
    ),
}
"""Modules whose names all keep their last part; ported where the target has the name.

The longest that fits counts.
"""

_MEAN = 'has the mean loss of a batch; TF 1 had its sum: loss_reduction="sum"'
NOTES = {
    **{
        f"estimator.{kind}{name}": _MEAN
        for kind in ("Linear", "DNN", "DNNLinearCombined", "Baseline")
        for name in ("Regressor", "Classifier")
    },
    "train.get_or_create_global_step": "is counted by the estimator",
    "compat.as_str_any": "is `str`",
    **dict.fromkeys(
        ("__version__", "VERSION", "version.VERSION"), "is Keras' version now"
    ),
    "Module": "is a layer of Keras now; one with a `call` of its own is called by it",
    "io.gfile.GFile": "opens local files only",
    "gfile.GFile": "opens local files only",
    "gfile.Open": "opens local files only",
    "Variable": (
        "Keras variables are made in `strategy.scope()`, with 32 bits unless "
        "`jax_enable_x64` is on"
    ),
    "keras.backend.shape": "is a tuple",
    "keras.backend.sqrt": "is NaN of negative numbers, where Keras 2 had 0",
    "shape": "is a tuple of numbers where they are known",
    "constant": "is an array; 64-bit ones become 32-bit ones",
    "random.set_seed": "gives other random numbers than TF's",
    "keras.callbacks.BackupAndRestore": "writes files of its own format",
    "keras.callbacks.TensorBoard": (
        "needs the package tensorboard: pip install 'replicax[tensorboard]'"
    ),
    "train.RMSPropOptimizer": "begins with averages of squares that are 0, TF's with 1",
    "train.Checkpoint": "writes files of its own format; TF's are not read",
    "math.segment_sum": "takes `num_segments` in a compiled step",
}
"""What is ported and behaves differently."""

DROPPED = {
    "enable_eager_execution": "JAX always is",
    "enable_v2_behavior": "there is one behaviour",
    "disable_v2_behavior": "there is one behaviour",
    "disable_eager_execution": "steps are compiled by `strategy.run`",
    "enable_resource_variables": "all variables are",
    "logging.set_verbosity": 'use `logging.getLogger("replicax").setLevel(...)`',
    "get_logger().setLevel": 'use `logging.getLogger("replicax").setLevel(...)`',
    "autograph.set_verbosity": "there is no AutoGraph",
    "config.run_functions_eagerly": "use `jax.disable_jit()` to debug",
    "config.experimental_run_functions_eagerly": "use `jax.disable_jit()` to debug",
    "config.optimizer.set_jit": "XLA always compiles",
    "config.optimizer.set_experimental_options": "XLA always compiles",
    "config.set_soft_device_placement": "JAX has none",
    "config.experimental.set_memory_growth": (
        "set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment"
    ),
    "config.experimental.enable_tensor_float_32_execution": (
        'use `jax.config.update("jax_default_matmul_precision", ...)`'
    ),
    "config.threading.set_intra_op_parallelism_threads": "XLA sizes its own pools",
    "config.threading.set_inter_op_parallelism_threads": "XLA sizes its own pools",
    "keras.backend.set_session": "there are no sessions",
    "keras.backend.manual_variable_initialization": "variables are made with values",
    "summary.trace_on": "use `jax.profiler.trace`",
    "debugging.set_log_device_placement": "JAX has none",
}
"""Calls that stand alone as a statement and are taken out, and why."""

_LOOKUPS = "StringLookup IntegerLookup TextVectorization Hashing HashedCrossing"
_LAYERS = frozenset(
    f"keras.layers.{prefix}{name}"
    for prefix in ("", "experimental.preprocessing.")
    for name in _LOOKUPS.split()
)
_READERS = frozenset(
    f"keras.{module}.{name}"
    for module in ("utils", "preprocessing")
    for name in (
        "audio_dataset_from_directory",
        "split_dataset",
        "text_dataset_from_directory",
        "timeseries_dataset_from_array",
    )
)
NEED_TENSORFLOW = _LAYERS | _READERS
"""What Keras has on all backends, and makes with TensorFlow."""

REASONS = {
    "Session": "is a TF 1 session that was not understood; call the step in a loop",
    "ConfigProto": "sessions have no settings here: remove it",
    "GPUOptions": "sessions have no settings here: remove it",
    "executing_eagerly": "is always true outside of steps: remove it",
    "random_normal_initializer": (
        "use keras.initializers.RandomNormal, whose stddev is 0.05"
    ),
    "random_uniform_initializer": (
        "use keras.initializers.RandomUniform, from -0.05 to 0.05"
    ),
    "truncated_normal_initializer": (
        "use keras.initializers.TruncatedNormal, whose stddev is 0.05"
    ),
    "GraphKeys": "use the attributes of Keras' models",
    "metrics.accuracy": (
        "make `keras.metrics.Accuracy()`, call its `update_state(labels, predictions)`"
        " and pass the metric itself"
    ),
    "placeholder": "is a TF 1 placeholder: make it an argument of a step function",
    "placeholder_with_default": "make it an argument of a step function",
    "get_variable": "use a Keras layer, or `keras.Variable` in `strategy.scope()`",
    "variable_scope": "use Keras layers, which name their variables",
    "get_collection": "use `model.losses` or `model.trainable_variables`",
    "trainable_variables": "use `model.trainable_variables`",
    "global_variables": "use `model.variables`",
    "global_variables_initializer": "variables are made with their values: remove it",
    "local_variables_initializer": "variables are made with their values: remove it",
    "gradients": "use `rx.GradientTape` or `rx.value_and_grad`",
    "train.MonitoredTrainingSession": (
        "is a TF 1 session; use `fit`, a loop of your own, or `rx.estimator`"
    ),
    "train.Supervisor": "use `fit`, a loop of your own, or `rx.estimator`",
    "train.Saver": "use `rx.Checkpoint` and `rx.CheckpointManager`",
    "train.Scaffold": "use `rx.Checkpoint`",
    "train.Server": "strategies start their own servers; all tasks run this script",
    "distribute.Server": (
        "strategies start their own servers; all tasks run this script"
    ),
    "train.replica_device_setter": "use `rx.ParameterServerStrategy`",
    "train.SyncReplicasOptimizer": "use `rx.MultiWorkerMirroredStrategy`",
    "train.exponential_decay": "use `keras.optimizers.schedules.ExponentialDecay`",
    "train.piecewise_constant": (
        "use `keras.optimizers.schedules.PiecewiseConstantDecay`"
    ),
    "train": "has no counterpart; use Keras' optimizers, or `rx.Checkpoint`",
    "summary": "use `rx.SummaryWriter(folder).scalar(name, value, step=step)`",
    "saved_model": (
        'use `model.save("model.keras")`; `model.export` writes one with TensorFlow'
    ),
    "io.gfile": "use `pathlib` or `os`",
    "gfile": "use `pathlib` or `os`",
    "io": "read it in NumPy, in the dataset's source",
    "image": (
        "use layers of Keras such as `keras.layers.RandomFlip`, `keras.ops.image`, or "
        "Pillow in the dataset"
    ),
    "audio": "use `keras.ops.stft` or SciPy",
    "strings": "strings stay on the host: use Python's in the dataset",
    "sparse": "use dense arrays, or `keras.layers.Embedding` for indices",
    "SparseTensor": "use dense arrays",
    "ragged": "pad it: `keras.utils.pad_sequences`",
    "RaggedTensor": "pad it: `keras.utils.pad_sequences`",
    "lookup": "use `keras.layers.StringLookup` on the host",
    "py_function": "call the function: nothing runs in a graph on the host",
    "numpy_function": "call the function: nothing runs in a graph on the host",
    "TensorArray": "use a Python list and `keras.ops.stack`, or `jax.lax.scan`",
    "scan": "use `keras.ops.scan` or `jax.lax.scan`",
    "map_fn": "use `keras.ops.map` or `keras.ops.vectorized_map`",
    "boolean_mask": "shapes are fixed in a compiled step: use `keras.ops.where`",
    "gather_nd": "index the array: `x[i, j]`",
    "clip_by_norm": "use `clipnorm=` of the optimizer",
    "split": "use `keras.ops.split`, whose list has positions, not sizes",
    "nn.dropout": "use `keras.layers.Dropout`",
    "nn.batch_normalization": "use `keras.layers.BatchNormalization`",
    "nn": "use the layer of Keras, or `keras.ops`",
    "layers": "use the layer of `keras.layers`",
    "losses": "use the loss of `keras.losses`",
    "metrics": "use the metric of `keras.metrics`, updated with `update_state`",
    "contrib": "is not in TensorFlow any more; look for it in Keras",
    "data": "stays with tf.data",
    "config.set_visible_devices": (
        "pass `devices=` to the strategy, or set CUDA_VISIBLE_DEVICES"
    ),
    "config.experimental.set_visible_devices": (
        "pass `devices=` to the strategy, or set CUDA_VISIBLE_DEVICES"
    ),
    "config": "devices are JAX's: `jax.devices()`, `rx.set_logical_devices(n)`",
    "debugging": "use `checkify` of JAX, or `jax.debug.print`",
    "profiler": "use `jax.profiler`",
    "device": 'use `keras.device("cpu:0")`',
    "function": "leave it away: `strategy.run` compiles",
    "autograph": "there is no AutoGraph",
    "TensorSpec": "is not needed: shapes come from the arguments",
    "control_dependencies": "order follows the program: remove it",
    "keras.preprocessing.image.ImageDataGenerator": (
        "use `keras.utils.image_dataset_from_directory` and layers such as "
        "`keras.layers.RandomFlip`"
    ),
    "keras.utils.multi_gpu_model": "use `rx.MirroredStrategy`",
    "keras.utils.experimental.DatasetCreator": (
        "pass `strategy.distribute_datasets_from_function(dataset_fn)` to `fit`"
    ),
    "keras.layers.experimental.SyncBatchNormalization": (
        "use keras.layers.BatchNormalization(synchronized=True)"
    ),
    **dict.fromkeys(
        _READERS,
        'stays: it makes tf.data datasets; keras.utils has it with format="grain", '
        "but for split_dataset",
    ),
    **dict.fromkeys(
        _LAYERS,
        "is made with TensorFlow: look words up in a dict or a sorted array, in the "
        "dataset",
    ),
    "keras.layers.CuDNNLSTM": "use keras.layers.LSTM",
    "keras.layers.CuDNNGRU": "use keras.layers.GRU",
    "keras.backend.set_learning_phase": "pass `training=` where the model is called",
    "keras.backend.learning_phase": "pass `training=` where the model is called",
    "keras.backend": "use `keras.ops`",
    "keras.wrappers.scikit_learn": "use `keras.wrappers.SKLearnClassifier`",
    "keras": "is not in Keras 3",
    "distribute.InputOptions": "pass `prefetch=` to `experimental_distribute_dataset`",
    "distribute.InputReplicationMode": (
        "use `strategy.distribute_datasets_from_function` with an `rx.InputContext`"
    ),
    "distribute.experimental_set_strategy": "use `with strategy.scope():`",
    "distribute": "is not in replicax",
    "estimator": "is not in `rx.estimator`",
    "feature_column": "is not in `rx.feature_column`",
    "tpu": "use `rx.TPUStrategy`",
    "raw_ops": "use `keras.ops`",
    "test.is_built_with_cuda": 'use `jax.default_backend() == "gpu"`',
    "test.is_built_with_gpu_support": 'use `jax.default_backend() == "gpu"`',
    "test": "use pytest",
}
"""Why a name stays, by the longest path that fits, and what to do instead."""

FOREIGN = {
    "tensorflow_datasets": (
        "needs TensorFlow; read arrays with `rx.input.numpy_dataset`, folders of "
        'images with `keras.utils.image_dataset_from_directory(..., format="grain")`'
    ),
    "tensorflow_hub": "needs TensorFlow; use `keras.applications` or KerasHub",
    "tensorflow_addons": "needs TensorFlow; many of its parts are in Keras 3",
    "tensorflow_probability": "use `tensorflow_probability.substrates.jax`",
    "tensorflow_text": "needs TensorFlow; use KerasHub's tokenizers",
    "tensorflow_model_optimization": "needs TensorFlow",
    "tensorflow_transform": "needs TensorFlow; transform the data beforehand",
    "horovod": "use `rx.MirroredStrategy` or `rx.MultiWorkerMirroredStrategy`",
}
"""Packages that stay, and why."""
