"""Pages of the API: which names stand on which page.

A page is a heading and a line for each name; mkdocstrings reads the sources. A public
name that stands on no page, or a page's name that is not public, is an error.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

STRATEGY = (
    "scope",
    "run",
    "reduce",
    "gather",
    "experimental_local_results",
    "experimental_distribute_dataset",
    "distribute_datasets_from_function",
    "experimental_distribute_values_from_function",
    "experimental_make_numpy_dataset",
    "num_replicas_in_sync",
    "is_chief",
    "check_replicas",
)
"""Methods of a strategy that scripts call; others are for the package itself."""

MEMBERS = {
    "Strategy": STRATEGY,
    "MultiWorkerMirroredStrategy": (
        "num_workers",
        "task_type",
        "task_id",
    ),
    "CentralStorageStrategy": (),
    "ParameterServerStrategy": (
        "num_replicas_in_sync",
        "is_chief",
        "staleness",
    ),
    "TPUStrategy": ("task_id",),
    "ReplicaContext": (
        "num_replicas_in_sync",
        "replica_id_in_sync_group",
        "all_reduce",
        "all_gather",
        "merge_call",
    ),
    "input.DistributedDataset": ("element_spec",),
    "input.DistributedDatasetFromFunction": ("element_spec",),
    "input.InputShard": ("num_steps", "in_step"),
    "input.Remainder": (),
    "layers.Embedding": (),
    "callbacks.Report": (),
    "callbacks.TensorBoard": (),
    "BackupAndRestore": (),
}
"""What is shown of a class whose other methods are for the package or for Keras."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of the API.

    Attributes:
        title: Its heading.
        text: What the names have in common.
        names: Names below `replicax`; `module.*` stands for all names of a module.
    """

    title: str
    text: str
    names: tuple[str, ...]


PAGES = {
    "strategies.md": Page(
        title="Strategies",
        text="Each strategy has the methods of `Strategy`, which come first.",
        names=(
            "Strategy",
            "OneDeviceStrategy",
            "MirroredStrategy",
            "MultiWorkerMirroredStrategy",
            "CentralStorageStrategy",
            "ParameterServerStrategy",
            "TPUStrategy",
            "FullyShardedStrategy",
            "ModelParallelStrategy",
            "layout_maps.*",
            "experimental.MultiWorkerMirroredStrategy",
        ),
    ),
    "steps.md": Page(
        title="Steps",
        text="What is used inside a replica function, and what `run` returns.",
        names=(
            "get_replica_context",
            "ReplicaContext",
            "GradientTape",
            "value_and_grad",
            "clip_by_global_norm",
            "distributed",
            "OptaxOptimizer",
            "compute_average_loss",
            "scale_regularization_loss",
            "PerReplica",
            "ReduceOp",
            "get_strategy",
            "has_strategy",
            "in_cross_replica_context",
            "schedules.LinearScalingWarmup",
        ),
    ),
    "input.md": Page(
        title="Input",
        text="Datasets, and how replicas and workers divide them.",
        names=(
            "InputContext",
            "AutoShardPolicy",
            "FileDataset",
            "input.*",
            "input.images.*",
        ),
    ),
    "gradients.md": Page(
        title="Gradient communication",
        text="Cross-device operations and their options.",
        names=(
            "CrossDeviceOps",
            "NcclAllReduce",
            "HierarchicalCopyAllReduce",
            "ReductionToOneDevice",
            "CommunicationOptions",
            "CollectiveCommunication",
        ),
    ),
    "clusters.md": Page(
        title="Clusters",
        text="Who takes part, on which machines and devices.",
        names=(
            "ClusterSpec",
            "Timeouts",
            "cluster_resolver.*",
            "set_logical_devices",
            "config.*",
            "tpu.experimental.*",
        ),
    ),
    "parameter-servers.md": Page(
        title="Parameter servers",
        text="The coordinator, how variables are cut, and large embeddings.",
        names=(
            "ClusterCoordinator",
            "RemoteValue",
            "PerWorkerValues",
            "experimental.partitioners.*",
            "layers.Embedding",
        ),
    ),
    "checkpoints.md": Page(
        title="Checkpoints and reports",
        text="What outlives a process.",
        names=(
            "Checkpoint",
            "CheckpointManager",
            "RestoreStatus",
            "latest_checkpoint",
            "BackupAndRestore",
            "SidecarEvaluator",
            "experimental.PreemptionCheckpointHandler",
            "callbacks.Report",
            "callbacks.TensorBoard",
            "SummaryWriter",
        ),
    ),
    "plans.md": Page(
        title="Plans",
        text="A training step on other hardware.",
        names=("plan", "planning.report.Plan", "planning.report.*"),
    ),
    "estimator.md": Page(
        title="Estimators",
        text="`rx.estimator`: names are those of `tf.estimator`, if no other is given.",
        names=(
            "estimator.Estimator",
            "estimator.EstimatorSpec",
            "estimator.RunConfig",
            "estimator.train_and_evaluate",
            "estimator.TrainSpec",
            "estimator.EvalSpec",
            "estimator.*",
            "estimator.experimental.*",
        ),
    ),
    "feature-columns.md": Page(
        title="Feature columns",
        text="`rx.feature_column`: names are those of `tf.feature_column`, too.",
        names=("feature_column.*",),
    ),
    "testing.md": Page(
        title="Testing",
        text="`rx.testing`: clusters on one machine, in tests.",
        names=("testing.run", "testing.*"),
    ),
    "errors.md": Page(
        title="Errors",
        text="Each is a builtin exception as well.",
        names=(
            "CheckpointError",
            "ClosureCancelledError",
            "ClosureError",
            "ClusterConfigError",
            "ClusterError",
            "ClusterMismatchError",
            "ContextError",
            "DeviceError",
            "DivergenceError",
            "InputError",
            "InternalError",
        ),
    ),
}
"""The pages, by file name."""


def module_file(module: str) -> Path:
    """The file of a module or package below `replicax`."""
    package, *rest = module.split(".")
    if package == "estimator":
        path = ROOT.joinpath("packages/estimator/src/replicax_estimator", *rest)
    else:
        path = ROOT.joinpath("src/replicax", *filter(None, [package, *rest]))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """A module's public names, read without importing anything.

    Those of the root are what its stub imports; other modules have an `__all__`.

    Raises:
        ValueError: If it has none.
    """
    if not module:
        stub = ast.parse((ROOT / "src/replicax/__init__.pyi").read_text("utf-8"))
        imports = [x for x in stub.body if isinstance(x, ast.ImportFrom)]
        return sorted(alias.name for node in imports for alias in node.names)
    file = module_file(module)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"api_pages: {file} has no __all__; expected a list of names.")


# These are shown under their own names, or are packages' parts that a page lists.
_ELSEWHERE = {
    "estimator": ("experimental", "export"),
    "planning": ("plan",),
    "input": ("AutoShardPolicy", "FileDataset", "InputContext", "images"),
}
_MODULES = {
    "experimental.partitioners": "partitioners",
    "feature_column": "estimator.feature_column",
    "tpu.experimental": "cluster.tpu_experimental",
}


def expanded(names: tuple[str, ...]) -> Iterator[str]:
    """The names, of `module.*` those that are not given by themselves."""
    for name in names:
        module, star, _ = name.partition(".*")
        if not star:
            yield name
            continue
        for part in public_names(_MODULES.get(module, module)):
            full = f"{module}.{part}"
            if part not in _ELSEWHERE.get(module, ()) and full not in names:
                yield full


def entry(name: str) -> str:
    """The lines that ask for a name's documentation."""
    lines = [f"::: replicax.{name}"]
    members = MEMBERS.get(name)
    if members == ():
        lines.append("    options:\n      members: []")
    elif members:
        shown = "".join(f"\n        - {member}" for member in members)
        lines.append(
            f"    options:\n      inherited_members: true\n      members:{shown}"
        )
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File names and Markdown of all pages.

    Raises:
        ValueError: If a public name stands on no page, or a page has another.
    """
    wanted = set(public_names(""))
    shown = [name for page in PAGES.values() for name in page.names]
    missing = sorted(wanted - {name.partition(".")[0] for name in shown} - {"losses"})
    known = wanted | {"planning"}  # Whose `plan` is public itself.
    unknown = sorted(n for n in shown if n.partition(".")[0] not in known)
    if missing or unknown:
        raise ValueError(
            f"api_pages: pages and replicax.__all__ differ; on no page: {missing}; not "
            f"public: {unknown}. Put each name on a page of PAGES."
        )
    return {
        file: f"# {page.title}\n\n{page.text}\n\n"
        + "\n".join(entry(name) for name in expanded(page.names))
        for file, page in PAGES.items()
    }
