"""The table of the seeds' programs: their blocks, how each is run, what it must print.

A block is code of a seed as its author wrote it, in `blocks/NNN_name.py.txt`. A file
with `.prelude` in its name comes before it and has what the text presupposes; one with
`.coda` has what the text says in words, or prints. All are written for TensorFlow, and
ported together.
"""

from tests.seeds.blocks_program import Machines, Planned, Process, Program, Tasks

__all__ = ["PROGRAMS"]


NO_GPU = "'/gpu:0' is not there"
CPUS = {"/gpu:0": "/cpu:0", "/gpu:1": "/cpu:1"}
RESNET = {"EXAMPLES": "8", "BATCH_SIZE": "4"}
RESNET_PRELUDES = ("004_digits.prelude", "004_resnet.prelude")
TRAIN = ("002_train.coda", "report.coda")
PHOTOS = {"EPOCHS": "5", "BATCH_SIZE": "64", "BATCHES": "1"}
"""Five epochs and batches of 64 are the text's; here an epoch is one of them."""


_PHOTOS = (
    # MobileNetV2 on four devices and on two machines; each trains on one of the two
    # image sets, which differ in nothing but photos and the number of classes.
    Program(
        name="001_multi_gpu_flowers",
        title="Training on a single machine with multiple GPUs: flowers",
        strategy="MirroredStrategy",
        parts=(
            "001_multi_gpu.prelude",
            "001_strategy",
            "001_folder.coda",
            "001_mobilenet.coda",
            "report.coda",
        ),
        run=Process(4),
        replicas=4,
        data="flowers",
        environment=PHOTOS,
        falls=True,
        is_slow=True,
        limit_s=500,
    ),
    Program(
        name="001_multi_worker_cats_vs_dogs",
        title="Training on multiple machines: cats_vs_dogs",
        strategy="MultiWorkerMirroredStrategy",
        parts=(
            "001_multi_gpu.prelude",
            "001_multi_worker.prelude",
            "001_tf_config",
            "001_multi_worker.coda",
            "001_arrays.coda",
            "001_mobilenet.coda",
            "report.coda",
        ),
        run=Machines({"worker:0": "localhost:20000", "worker:1": "localhost:20001"}),
        replicas=2,
        data="cats_vs_dogs",
        environment=PHOTOS,
        falls=True,
        is_slow=True,
        limit_s=500,
    ),
)


def _guide(name: str, title: str, strategy: str, variable: str, **other: object):
    """A strategy of the guide that makes nothing but it, and then trains with it."""
    values = {
        "name": name,
        "title": title,
        "strategy": strategy,
        "parts": ("002_import", name, *TRAIN),
        "names": {"strategy": variable},
        "replicas": 2,
        "falls": True,
    }
    return Program(**{**values, **other})  # type: ignore[arg-type]


_SEED_000 = (
    Program(
        name="000_keras",
        title="Mirrored Strategy: Keras example",
        strategy="MirroredStrategy",
        parts=("000_mnist.prelude", "000_keras", "000_fit.coda", "report.coda"),
        replicas=2,
        falls=True,
        # Its lines run in the loop's program as well.
        is_slow=True,
    ),
    Program(
        name="000_loop",
        title="Mirrored Strategy: custom training example",
        strategy="MirroredStrategy",
        parts=(
            "000_mnist.prelude",
            "000_keras",
            "000_loop.prelude",
            "000_loop",
            "000_loop.coda",
        ),
        replicas=2,
        # Ten epochs of eight batches.
        prints=("Steps: 80", r"Last loss: [\d.]+"),
        at_least={"Accuracy": 0.5},
    ),
)

_SEED_001 = (
    Program(
        name="001_scope",
        title="Training on a single machine with multiple GPUs",
        strategy="MirroredStrategy",
        parts=(
            "001_model.prelude",
            "001_strategy",
            "001_scope",
            "001_fit.coda",
            "report.coda",
        ),
        replicas=2,
        falls=True,
    ),
    Program(
        name="001_devices",
        title="Tip: the devices, without GPUs",
        strategy="MirroredStrategy",
        parts=("001_model.prelude", "001_devices"),
        error=NO_GPU,
        is_slow=True,
    ),
    Program(
        name="001_devices_of_cpu",
        title="Tip: the devices, CPUs for GPUs",
        strategy="MirroredStrategy",
        parts=(
            "001_model.prelude",
            "001_devices",
            "001_scope",
            "001_fit.coda",
            "report.coda",
        ),
        replaced=CPUS,
        run=Process(4),
        replicas=2,
        falls=True,
        is_slow=True,
    ),
    *_PHOTOS,
)

_STRATEGIES_002 = (
    _guide(
        "002_mirrored",
        "MirroredStrategy",
        "MirroredStrategy",
        "mirrored_strategy",
        is_slow=True,
    ),
    Program(
        name="002_devices",
        title="MirroredStrategy: some GPUs, without GPUs",
        strategy="MirroredStrategy",
        parts=("002_import", "002_devices"),
        error=NO_GPU,
    ),
    _guide(
        "002_devices_of_cpu",
        "MirroredStrategy: some GPUs, CPUs for GPUs",
        "MirroredStrategy",
        "mirrored_strategy",
        parts=("002_import", "002_devices", *TRAIN),
        replaced=CPUS,
        run=Process(4),
        is_slow=True,
    ),
    _guide(
        "002_hierarchical_copy",
        "MirroredStrategy: cross device communication",
        "MirroredStrategy",
        "mirrored_strategy",
        is_slow=True,
    ),
    _guide(
        "002_central_storage",
        "CentralStorageStrategy",
        "CentralStorageStrategy",
        "central_storage_strategy",
        is_slow=True,
    ),
    _guide(
        "002_multi_worker",
        "MultiWorkerMirroredStrategy, AUTO",
        "MultiWorkerMirroredStrategy",
        "multiworker_strategy",
        run=Tasks(workers=2),
        is_slow=True,
    ),
    Program(
        name="002_nccl",
        title="MultiWorkerMirroredStrategy: NCCL, without GPUs",
        strategy="MultiWorkerMirroredStrategy",
        parts=("002_import", "002_nccl"),
        error="CollectiveCommunication.NCCL needs GPUs, but the devices are cpu",
        is_slow=True,
    ),
    _guide(
        "002_tpu",
        "TPUStrategy",
        "TPUStrategy",
        "tpu_strategy",
        run=Planned(),
        replicas=None,
        falls=False,
        # Its lines run with the estimator as well.
        is_slow=True,
    ),
    _guide(
        "002_parameter_server",
        "ParameterServerStrategy",
        "ParameterServerStrategy",
        "ps_strategy",
        run=Tasks(workers=2, ps=1),
        replicas=None,
        is_slow=True,
    ),
    Program(
        name="002_tf_config",
        title="Setting up TF_CONFIG: as printed",
        strategy="ParameterServerStrategy",
        parts=(
            "002_import",
            "002_tf_config.prelude",
            "002_tf_config",
            "002_parameter_server",
        ),
        error="address 'host1:port' of worker:0",
    ),
    _guide(
        "002_tf_config_of_five",
        "Setting up TF_CONFIG: three workers, two servers",
        "ParameterServerStrategy",
        "ps_strategy",
        parts=(
            "002_import",
            "002_tf_config.prelude",
            "002_tf_config",
            "002_parameter_server",
            *TRAIN,
        ),
        run=Machines(
            {
                "worker:0": "host1:port",
                "worker:1": "host2:port",
                "worker:2": "host3:port",
                "ps:0": "host4:port",
                "ps:1": "host5:port",
            }
        ),
        replicas=None,
        is_slow=True,
    ),
)

_USES_002 = (
    Program(
        name="002_keras_dataset",
        title="tf.distribute.Strategy with Keras: a dataset",
        strategy="MirroredStrategy",
        parts=("002_import", "002_keras_model", "002_keras_dataset", "report.coda"),
        names={"strategy": "mirrored_strategy"},
        replicas=2,
        falls=True,
        is_slow=True,
    ),
    Program(
        name="002_keras_numpy",
        title="tf.distribute.Strategy with Keras: NumPy arrays",
        strategy="MirroredStrategy",
        parts=("002_import", "002_keras_model", "002_keras_numpy", "report.coda"),
        names={"strategy": "mirrored_strategy"},
        replicas=2,
        falls=True,
        is_slow=True,
    ),
    Program(
        name="002_keras_batch_size",
        title="tf.distribute.Strategy with Keras: the global batch",
        strategy="MirroredStrategy",
        parts=(
            "002_import",
            "002_keras_model",
            "002_keras_batch_size",
            "002_keras_batch_size.coda",
            "report.coda",
        ),
        names={"strategy": "mirrored_strategy"},
        replicas=2,
        falls=True,
        is_slow=True,
    ),
    Program(
        name="002_estimator",
        title="tf.distribute.Strategy with Estimator",
        strategy="MirroredStrategy",
        parts=(
            "002_import",
            "002_estimator",
            "002_estimator_train",
            "002_estimator_train.coda",
        ),
        replicas=2,
        prints=("global_step: 10", r"average_loss: [\d.e-]+"),
        at_least={"prediction": 0.999},
    ),
    Program(
        name="002_estimator_tpu",
        title="tf.distribute.Strategy with Estimator: TPUs",
        strategy="TPUStrategy",
        parts=(
            "002_import",
            "002_tpu",
            "002_estimator_tpu",
            "002_estimator_tpu.coda",
            "002_estimator_train",
        ),
        run=Planned(),
        is_slow=True,
    ),
    Program(
        name="002_loop",
        title="tf.distribute.Strategy with custom training loops",
        strategy="MirroredStrategy",
        parts=(
            "002_import",
            "002_keras_model",
            "002_keras_batch_size",
            "002_loop_model",
            "002_loop_dataset",
            "002_loop_step",
            "002_loop_session",
            "002_loop_session.coda",
        ),
        # The guide prints ten times 0.0 as well: its softmax has one class.
        prints=(r"(?:0\.0\s+){10}Steps: 10",),
        is_slow=True,
    ),
)

_SEED_003 = (
    Program(
        name="003_synchronous",
        title="Synchronous training",
        strategy="MirroredStrategy",
        parts=("003_patients.prelude", "003_synchronous", "report.coda"),
        names={"strategy": "mirrored_strategy"},
        replicas=2,
        falls=True,
        is_slow=True,
    ),
    Program(
        name="003_asynchronous",
        title="Asynchronous training",
        strategy="ParameterServerStrategy",
        parts=("003_patients.prelude", "003_asynchronous", "report.coda"),
        names={"strategy": "async_strategy"},
        run=Tasks(workers=2, ps=1),
        falls=True,
        is_slow=True,
    ),
    Program(
        name="003_tpu",
        title="ASICs",
        strategy="TPUStrategy",
        parts=("003_patients.prelude", "003_tpu.prelude", "003_tpu", "003_tpu.coda"),
        run=Planned(),
        is_slow=True,
    ),
)

_SEED_004 = tuple(
    Program(
        name=name,
        title=strategy,
        strategy=strategy,
        parts=(*preludes, name, "report.coda"),
        names={"model": "resnet_model"},
        run=run,
        environment=RESNET,
        replicas=replicas,
        falls=True,
        is_slow=True,
        limit_s=500,
    )
    for name, strategy, preludes, run, replicas in [
        ("004_mirrored", "MirroredStrategy", RESNET_PRELUDES[:1], Process(), 2),
        (
            "004_multi_worker",
            "MultiWorkerMirroredStrategy",
            RESNET_PRELUDES,
            Machines(
                {"worker:0": "192.168.1.100:2222", "worker:1": "192.168.1.101:2222"}
            ),
            2,
        ),
        (
            "004_central_storage",
            "CentralStorageStrategy",
            RESNET_PRELUDES,
            Process(),
            2,
        ),
        (
            "004_parameter_server",
            "ParameterServerStrategy",
            RESNET_PRELUDES,
            Tasks(workers=2, ps=1),
            None,
        ),
    ]
)

PROGRAMS = (
    *_SEED_000,
    *_SEED_001,
    *_STRATEGIES_002,
    *_USES_002,
    *_SEED_003,
    *_SEED_004,
)
"""All of them, in the seeds' order."""
