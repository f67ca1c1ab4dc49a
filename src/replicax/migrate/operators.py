"""Tables of TensorFlow's operations: what each is called in Keras and in NumPy.

A row is `names | TF's parameters | target | target's parameters`, the parameters one
below the other in order. `-` drops an argument, `!` is one that has no counterpart, so
that a call with it is left alone, `*` one that must be named. `name=value` after them
is a default of TF's that is not the target's, written out where the call leaves it out.
"""

from dataclasses import dataclass, field

__all__ = ["DEVICE_OPERATORS", "HOST_OPERATORS", "Operator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What a function of TensorFlow is called elsewhere.

    Attributes:
        target: Its dotted name, such as `"keras.ops.sum"`.
        parameters: TF's parameters in their order, each with the target's, or `-`/`!`.
        defaults: Defaults of TF's that the target does not have, as source text.
    """

    target: str
    parameters: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)


_REDUCTIONS = (
    ("reduce_sum", "sum"),
    ("reduce_mean", "mean"),
    ("reduce_max", "max"),
    ("reduce_min", "min"),
    ("reduce_prod", "prod"),
    ("reduce_any", "any"),
    ("reduce_all", "all"),
)
_UNARY = """
abs sqrt square exp log sin cos tan tanh floor sign round sigmoid
math.expm1:expm1 math.log1p:log1p math.erf:erf math.rsqrt:rsqrt math.ceil:ceil
math.reciprocal:reciprocal math.is_nan:isnan math.is_inf:isinf math.negative:negative
math.is_finite:isfinite math.softplus:softplus math.sinh:sinh math.cosh:cosh
math.abs:abs math.sqrt:sqrt math.square:square math.exp:exp math.log:log math.sin:sin
math.cos:cos math.tan:tan math.tanh:tanh math.floor:floor math.sign:sign
math.round:round math.sigmoid:sigmoid logical_not math.logical_not:logical_not
negative linalg.inv:inv linalg.det:det rsqrt ceil log1p is_nan:isnan
nn.sigmoid:sigmoid nn.tanh:tanh
"""
_BINARY = """
add subtract multiply divide maximum minimum pow:power equal not_equal less less_equal
greater greater_equal logical_and logical_or math.add:add math.subtract:subtract
math.multiply:multiply math.divide:divide math.maximum:maximum math.minimum:minimum
math.pow:power math.equal:equal math.not_equal:not_equal math.less:less
math.less_equal:less_equal math.greater:greater math.greater_equal:greater_equal
math.logical_and:logical_and math.logical_or:logical_or math.mod:mod
math.floormod:mod math.floordiv:floor_divide truediv:divide math.truediv:divide
"""
_DEVICE = """
cast | x dtype name | keras.ops.cast | x dtype -
argmax math.argmax | input axis output_type name | keras.ops.argmax | x axis ! - | axis=0
argmin math.argmin | input axis output_type name | keras.ops.argmin | x axis ! - | axis=0
reduce_logsumexp math.reduce_logsumexp | input_tensor axis keepdims name | keras.ops.logsumexp | x axis keepdims -
math.reduce_std | input_tensor axis keepdims name | keras.ops.std | x axis keepdims -
math.reduce_variance | input_tensor axis keepdims name | keras.ops.var | x axis keepdims -
math.count_nonzero | input axis keepdims dtype name | keras.ops.count_nonzero | x axis ! ! -
tensordot | a b axes name | keras.ops.tensordot | x1 x2 axes -
reshape | tensor shape name | keras.ops.reshape | x newshape -
transpose | a perm conjugate name | keras.ops.transpose | x axes ! -
expand_dims | input axis name | keras.ops.expand_dims | x axis -
squeeze | input axis name | keras.ops.squeeze | x axis -
concat | values axis name | keras.ops.concatenate | xs axis -
stack | values axis name | keras.ops.stack | x axis -
unstack | value num axis name | keras.ops.unstack | x num axis -
tile | input multiples name | keras.ops.tile | x repeats -
repeat | input repeats axis name | keras.ops.repeat | x repeats axis -
gather | params indices validate_indices axis batch_dims name | keras.ops.take | x indices - axis ! - | axis=0
nn.embedding_lookup | params ids max_norm name | keras.ops.take | x indices ! - | axis=0
where | condition x y name | keras.ops.where | condition x1 x2 -
one_hot | indices depth on_value off_value axis dtype name | keras.ops.one_hot | x num_classes ! ! axis dtype -
shape | input out_type name | keras.ops.shape | x - -
size | input out_type name | keras.ops.size | x - -
rank | input name | keras.ops.ndim | x -
zeros | shape dtype name | keras.ops.zeros | shape dtype -
ones | shape dtype name | keras.ops.ones | shape dtype -
zeros_like | input dtype name | keras.ops.zeros_like | x dtype -
ones_like | input dtype name | keras.ops.ones_like | x dtype -
fill | dims value name | keras.ops.full | shape fill_value -
eye | num_rows num_columns batch_shape dtype name | keras.ops.eye | N M ! *dtype -
range | start limit delta dtype name | keras.ops.arange | start stop step dtype -
linspace | start stop num name axis | keras.ops.linspace | start stop num - *axis
constant | value dtype shape name | keras.ops.array | x dtype ! -
convert_to_tensor | value dtype dtype_hint name | keras.ops.convert_to_tensor | x dtype - -
stop_gradient | input name | keras.ops.stop_gradient | variable -
clip_by_value | t clip_value_min clip_value_max name | keras.ops.clip | x x_min x_max -
norm linalg.norm | tensor ord axis keepdims name | keras.ops.norm | x ord axis keepdims -
sort | values axis direction name | keras.ops.sort | x axis ! -
argsort | values axis direction stable name | keras.ops.argsort | x axis ! - -
math.top_k nn.top_k | input k sorted index_type name | keras.ops.top_k | x k sorted - -
math.in_top_k nn.in_top_k | targets predictions k name | keras.ops.in_top_k | targets predictions k -
nn.bias_add | value bias data_format name | keras.ops.add | x1 x2 ! -
clip_by_global_norm | t_list clip_norm use_norm name | rx.clip_by_global_norm | tensors clip_norm ! -
math.divide_no_nan | x y name | keras.ops.divide_no_nan | x1 x2 -
keras.backend.random_normal | shape mean stddev dtype seed | keras.random.normal | shape mean stddev dtype seed
keras.backend.random_uniform | shape minval maxval dtype seed | keras.random.uniform | shape minval maxval dtype seed
profiler.experimental.start | logdir options | jax.profiler.start_trace | log_dir -
profiler.experimental.stop | save | jax.profiler.stop_trace | -
cond | pred true_fn false_fn name | keras.ops.cond | pred true_fn false_fn -
while_loop | cond body loop_vars shape_invariants parallel_iterations back_prop swap_memory maximum_iterations name | keras.ops.while_loop | cond body loop_vars - - - - maximum_iterations -
vectorized_map | fn elems fallback_to_while_loop warn | keras.ops.vectorized_map | function elements - -
roll | input shift axis name | keras.ops.roll | x shift axis -
reverse | tensor axis name | keras.ops.flip | x axis -
broadcast_to | input shape name | keras.ops.broadcast_to | x shape -
cumsum math.cumsum | x axis exclusive reverse name | keras.ops.cumsum | x axis ! ! - | axis=0
cumprod math.cumprod | x axis exclusive reverse name | keras.ops.cumprod | x axis ! ! - | axis=0
math.segment_sum math.unsorted_segment_sum | data segment_ids num_segments name | keras.ops.segment_sum | data segment_ids num_segments -
is_tensor | x | keras.ops.is_tensor | x
linalg.trace | x name | keras.ops.trace | x -
linalg.cholesky | input name | keras.ops.cholesky | x -
linalg.solve | matrix rhs adjoint name | keras.ops.solve | a b ! -
nn.relu | features name | keras.ops.relu | x -
nn.relu6 | features name | keras.ops.relu6 | x -
nn.leaky_relu | features alpha name | keras.ops.leaky_relu | x negative_slope -
nn.elu | features name | keras.ops.elu | x -
nn.selu | features name | keras.ops.selu | x -
nn.gelu | features approximate name | keras.ops.gelu | x approximate - | approximate=False
nn.silu nn.swish | features | keras.ops.silu | x
nn.softplus | features name | keras.ops.softplus | x -
nn.softsign | features name | keras.ops.softsign | x -
nn.softmax | logits axis name | keras.ops.softmax | x axis -
nn.log_softmax | logits axis name | keras.ops.log_softmax | x axis -
nn.moments | x axes shift keepdims name | keras.ops.moments | x axes - keepdims -
nn.l2_normalize math.l2_normalize linalg.l2_normalize | x axis epsilon name | keras.ops.normalize | x axis ! -
nn.softmax_cross_entropy_with_logits nn.softmax_cross_entropy_with_logits_v2 | labels logits axis name | keras.ops.categorical_crossentropy | target output *axis - | from_logits=True
nn.sparse_softmax_cross_entropy_with_logits | labels logits name | keras.ops.sparse_categorical_crossentropy | target output - | from_logits=True
nn.sigmoid_cross_entropy_with_logits | labels logits name | keras.ops.binary_crossentropy | target output - | from_logits=True
random.normal random_normal | shape mean stddev dtype seed name | keras.random.normal | shape mean stddev dtype seed -
random.uniform random_uniform | shape minval maxval dtype seed name | keras.random.uniform | shape minval maxval dtype seed -
random.truncated_normal truncated_normal | shape mean stddev dtype seed name | keras.random.truncated_normal | shape mean stddev dtype seed -
random.categorical | logits num_samples dtype seed name | keras.random.categorical | logits num_samples dtype seed -
random.shuffle | value seed name | keras.random.shuffle | x *seed -
nn.compute_average_loss | per_example_loss sample_weight global_batch_size | rx.compute_average_loss | per_example_loss sample_weight global_batch_size
nn.scale_regularization_loss | regularization_loss | rx.scale_regularization_loss | regularization_loss
Variable | initial_value trainable validate_shape caching_device name variable_def dtype import_scope constraint synchronization aggregation shape | keras.Variable | initializer *trainable - - *name ! *dtype - ! *synchronization *aggregation -
train.GradientDescentOptimizer | learning_rate use_locking name | keras.optimizers.SGD | learning_rate - *name
train.MomentumOptimizer | learning_rate momentum use_locking name use_nesterov | keras.optimizers.SGD | learning_rate momentum - *name *nesterov
train.AdamOptimizer | learning_rate beta1 beta2 epsilon use_locking name | keras.optimizers.Adam | learning_rate beta_1 beta_2 epsilon - *name | epsilon=1e-8
train.AdagradOptimizer | learning_rate initial_accumulator_value use_locking name | keras.optimizers.Adagrad | learning_rate initial_accumulator_value - *name
train.RMSPropOptimizer | learning_rate decay momentum epsilon use_locking centered name | keras.optimizers.RMSprop | learning_rate rho momentum epsilon - *centered *name | epsilon=1e-10
train.FtrlOptimizer | learning_rate learning_rate_power initial_accumulator_value l1_regularization_strength l2_regularization_strength use_locking name | keras.optimizers.Ftrl | learning_rate learning_rate_power initial_accumulator_value l1_regularization_strength l2_regularization_strength - *name
random.set_seed random.set_random_seed set_random_seed | seed | keras.utils.set_random_seed | seed
"""  # noqa: E501

_BACKEND = """
mean sum max min prod any all std var logsumexp | x axis keepdims | x axis keepdims
argmax argmin | x axis | x axis | axis=-1
abs sqrt square exp log round sign sin cos tanh sigmoid softplus softsign ndim transpose | x | x
relu | x alpha max_value threshold | x ! ! !
elu | x alpha | x alpha
softmax | x axis | x axis
maximum minimum equal not_equal greater greater_equal less less_equal dot | x y | x1 x2
pow:power | x a | x1 x2
cast | x dtype | x dtype
clip | x min_value max_value | x x_min x_max
concatenate | tensors axis | xs axis | axis=-1
stack | x axis | x axis
reshape | x shape | x newshape
permute_dimensions:transpose | x pattern | x axes
expand_dims | x axis | x axis | axis=-1
squeeze | x axis | x axis
repeat_elements:repeat | x rep axis | x repeats axis
tile | x n | x repeats
flatten:ravel shape int_shape:shape | x | x
gather:take | reference indices | x indices | axis=0
one_hot | indices num_classes | x num_classes
zeros ones | shape dtype name | shape dtype -
zeros_like ones_like | x dtype name | x dtype -
eye | size dtype name | N *dtype -
cumsum cumprod | x axis | x axis | axis=0
arange | start stop step dtype | start stop step dtype | dtype="int32"
reverse:flip | x axes | x axis
stop_gradient | variables | variable
l2_normalize:normalize | x axis | x axis | axis=None
constant:array | value dtype shape name | x dtype ! -
get_value:convert_to_numpy eval:convert_to_numpy | x | x
binary_crossentropy sparse_categorical_crossentropy categorical_crossentropy | target output from_logits axis | target output from_logits !
"""  # noqa: E501

_HOST = """
argmax math.argmax | input axis output_type name | np.argmax | a axis ! - | axis=0
argmin math.argmin | input axis output_type name | np.argmin | a axis ! - | axis=0
reshape | tensor shape name | np.reshape | a shape -
transpose | a perm conjugate name | np.transpose | a axes ! -
expand_dims | input axis name | np.expand_dims | a axis -
squeeze | input axis name | np.squeeze | a axis -
concat | values axis name | np.concatenate | arrays axis -
stack | values axis name | np.stack | arrays axis -
tile | input multiples name | np.tile | A reps -
repeat | input repeats axis name | np.repeat | a repeats axis -
where | condition x y name | np.where | condition x y -
shape | input out_type name | np.shape | a - -
size | input out_type name | np.size | a - -
rank | input name | np.ndim | a -
zeros | shape dtype name | np.zeros | shape dtype - | dtype="float32"
ones | shape dtype name | np.ones | shape dtype - | dtype="float32"
zeros_like | input dtype name | np.zeros_like | a dtype -
ones_like | input dtype name | np.ones_like | a dtype -
fill | dims value name | np.full | shape fill_value -
constant | value dtype shape name | np.array | object dtype ! -
convert_to_tensor | value dtype dtype_hint name | np.array | object dtype - -
clip_by_value | t clip_value_min clip_value_max name | np.clip | a a_min a_max -
reverse | tensor axis name | np.flip | m axis -
roll | input shift axis name | np.roll | a shift axis -
broadcast_to | input shape name | np.broadcast_to | array shape -
"""
_HOST_UNARY = {
    **{
        prefix + name: name
        for prefix in ("", "math.")
        for name in (
            "abs",
            "sqrt",
            "square",
            "exp",
            "log",
            "sin",
            "cos",
            "tanh",
            "floor",
            "sign",
        )
    },
    "math.log1p": "log1p",
    "math.ceil": "ceil",
    "round": "round",
}
_HOST_BINARY = {
    **{
        prefix + name: name
        for prefix in ("", "math.")
        for name in ("add", "subtract", "multiply", "divide")
    },
    **{name: name for name in ["maximum", "minimum", "equal", "less", "greater"]},
    "pow": "power",
    "math.pow": "power",
}


def _row(line: str) -> dict[str, Operator]:
    names, parameters, target, targets, *defaults = (s.strip() for s in line.split("|"))
    pairs = zip(parameters.split(), targets.split(), strict=True)
    written = dict(text.split("=") for text in defaults)
    operator = Operator(target=target, parameters=dict(pairs), defaults=written)
    return dict.fromkeys(names.split(), operator)


def _renamed(text: str, module: str, parameters: dict[str, str]) -> dict[str, Operator]:
    """Functions whose parameters all have the same names."""
    table = {}
    for entry in text.split():
        name, _, target = entry.partition(":")
        target = f"{module}.{target or name.rpartition('.')[2]}"
        table[name] = Operator(target=target, parameters=parameters)
    return table


def _device_operators() -> dict[str, Operator]:
    table = _renamed(_UNARY, "keras.ops", {"x": "x", "name": "-"})
    pair = {"x": "x1", "y": "x2", "name": "-"}
    table |= _renamed(_BINARY, "keras.ops", pair)
    for name, target in _REDUCTIONS:
        row = f"{name} math.{name} | input_tensor axis keepdims name | "
        table |= _row(f"{row} keras.ops.{target} | x axis keepdims -")
    for line in _DEVICE.strip().splitlines():
        table |= _row(line)
    for line in _BACKEND.strip().splitlines():
        names, rest = line.split("|", 1)
        parameters, targets = rest.split("|", 1)
        for entry in names.split():
            name, _, target = entry.partition(":")
            row = f"keras.backend.{name} | {parameters} | keras.ops.{target or name}"
            table |= _row(f"{row} | {targets}")
    return table


def _host_operators() -> dict[str, Operator]:
    table = {}
    for name, target in _REDUCTIONS:
        row = f"{name} math.{name} | input_tensor axis keepdims name | "
        table |= _row(f"{row} np.{target} | a axis *keepdims -")
    for line in _HOST.strip().splitlines():
        table |= _row(line)
    for name, target in _HOST_UNARY.items():
        first = "a" if target == "round" else "x"
        table |= _row(f"{name} | x name | np.{target} | {first} -")
    for name, target in _HOST_BINARY.items():
        table |= _row(f"{name} | x y name | np.{target} | x1 x2 -")
    return table


DEVICE_OPERATORS = _device_operators()
"""What runs on devices: path under `tensorflow` to an operation of Keras."""
HOST_OPERATORS = _host_operators()
"""What runs in an input pipeline: path under `tensorflow` to a function of NumPy."""
