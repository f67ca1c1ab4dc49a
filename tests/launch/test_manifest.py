"""Manifests: valid by the published schemas, and a cluster for those who read them."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from replicax.cli import app
from replicax.cluster.config import tf_config
from replicax.cluster.kubernetes import KubernetesClusterResolver
from replicax.errors import ClusterConfigError
from replicax.launch.manifest import TrainingJob, jobset, to_yaml

SCHEMAS = Path(__file__).with_name("schemas") / "kubernetes.json"
BASE = {"image": "registry/train:1", "command": ("python", "train.py")}
FULL = {
    **BASE,
    "num_workers": 12,
    "name": "digits",
    "namespace": "research",
    "chief": True,
    "num_ps": 2,
    "evaluator": True,
    "gpus_per_worker": 4,
    "cpus": "7500m",
    "memory": "64Gi",
    "max_restarts": 0,
    "checkpoint_claim": "shared.nfs",
    "checkpoint_path": "/mnt/ckpt",
    "env": {"LEVEL": "3", "NOTE": "a $(HOME) of $5\nand: more"},
}
JOBS = [
    {**BASE, "num_workers": 1},
    {**BASE, "num_workers": 4, "evaluator": True},
    {**BASE, "num_workers": 2, "num_ps": 1, "memory": "8Gi"},
    FULL,
]


def problems(document: Any) -> list[str]:
    """What the published schema of a JobSet finds wrong with the document."""
    schemas = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    root = {**schemas, "$ref": "#/$defs/JobsetV1alpha2JobSet"}
    Draft202012Validator.check_schema(root)
    return [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(root).iter_errors(document)
    ]


def expanded(text: str, known: dict[str, str]) -> str:
    """The text as a container gets it: references replaced, `$$` for `$`."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def container_env(container: dict, annotations: dict[str, str]) -> dict[str, str]:
    """A container's variables, in order: one sees those before it only."""
    known: dict[str, str] = {}
    for variable in container["env"]:
        if "value" in variable:
            known[variable["name"]] = expanded(variable["value"], known)
            continue
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        key = re.fullmatch(r"metadata\.annotations\['(.*)'\]", path)
        assert key
        known[variable["name"]] = annotations.get(key[1], "")
    return known


def replicated_jobs(document: dict) -> dict[str, dict]:
    return {part["name"]: part for part in document["spec"]["replicatedJobs"]}


def pods(document: dict) -> Iterator[tuple[str, int, dict, dict[str, str]]]:
    """Role, index, container and variables of every pod of a JobSet."""
    for role, part in replicated_jobs(document).items():
        spec = part["template"]["spec"]
        [container] = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            annotations = {
                "batch.kubernetes.io/job-completion-index": str(index),
                "jobset.sigs.k8s.io/restart-attempt": "2",
            }
            yield role, index, container, container_env(container, annotations)


@pytest.mark.parametrize("options", JOBS, ids=["least", "evaluator", "ps", "full"])
def test_manifest_is_valid(options: dict) -> None:
    document: Any = jobset(TrainingJob(**options))
    assert yaml.safe_load(to_yaml(document)) == document
    assert problems(document) == []
    assert list(document) == ["apiVersion", "kind", "metadata", "spec"]


def test_pods_get_their_place_in_the_cluster() -> None:
    document = jobset(TrainingJob(**{**FULL, "command": ["python", "t.py", "$(X) $$"]}))
    seen = []
    for role, index, container, env in pods(document):
        task = tf_config(env["TF_CONFIG"])
        assert (task.task_type, task.task_id) == (role, index)
        assert task.cluster.as_dict() == {
            "chief": ["digits-chief-0-0.digits:2222"],
            "worker": [f"digits-worker-0-{i}.digits:2222" for i in range(12)],
            "ps": [f"digits-ps-0-{i}.digits:2222" for i in range(2)],
        }
        assert env["NOTE"] == FULL["env"]["NOTE"]
        assert env["REPLICAX_ATTEMPT"] == "2"
        words = [expanded(word, env) for word in container["command"]]
        assert words == ["python", "t.py", "$(X) $$"]
        seen.append(role)
    assert {role: seen.count(role) for role in seen} == {
        "chief": 1,
        "worker": 12,
        "ps": 2,
        "evaluator": 1,
    }


def test_the_index_precedes_its_reference() -> None:
    document = jobset(TrainingJob(**BASE, num_workers=2))
    [(_, _, container, env), _] = pods(document)
    assert json.loads(env["TF_CONFIG"])["task"]["index"] == 0
    # In another order the reference stays as it is, as in a real container.
    index, config = container["env"][:2]
    annotations = {"batch.kubernetes.io/job-completion-index": "0"}
    wrong = container_env({"env": [config, index]}, annotations)
    with pytest.raises(ClusterConfigError, match="JSON"):
        tf_config(wrong["TF_CONFIG"])


def test_resolver_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    document = jobset(TrainingJob(**BASE, num_workers=3))
    for role, index, _, env in pods(document):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", env["JOB_COMPLETION_INDEX"])
        monkeypatch.setenv("JOBSET_NAME", "train")
        monkeypatch.setenv("JOBSET_REPLICATED_JOB_NAME", role)
        resolver = KubernetesClusterResolver(3)
        assert resolver.cluster_spec() == tf_config(env["TF_CONFIG"]).cluster
        assert (resolver.task_type, resolver.task_id) == (role, index)


def test_restarts_as_a_gang_by_exit_code() -> None:
    document: Any = jobset(TrainingJob(**FULL))
    policy = document["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 0
    assert policy["restartStrategy"] == "BlockingRecreate"
    [rule] = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == (
        "FailJobSet",
        ["PodFailurePolicy"],
    )
    # What JobSet asks of a rule's name.
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    for role, part in replicated_jobs(document).items():
        spec = part["template"]["spec"]
        assert spec["backoffLimit"] == 0
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"]
        # A pod failure policy needs this restart policy.
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        evicted, permanent = spec["podFailurePolicy"]["rules"]
        assert evicted["action"] == "Count"
        assert permanent["action"] == "FailJob"
        codes = permanent["onExitCodes"]
        assert codes["containerName"] == role
        assert codes["values"] == [*range(1, 128), 130]


def test_success_policy() -> None:
    document: Any = jobset(TrainingJob(**FULL))
    assert document["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["chief", "worker", "evaluator"],
    }


def test_resources_and_volumes() -> None:
    parts = replicated_jobs(jobset(TrainingJob(**FULL)))
    for role, part in parts.items():
        spec = part["template"]["spec"]["template"]["spec"]
        [container] = spec["containers"]
        assert container["resources"]["requests"] == {"cpu": "7500m", "memory": "64Gi"}
        assert container["resources"]["limits"].get("nvidia.com/gpu") == (
            None if role == "ps" else 4
        )
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounts == {"shared-memory": "/dev/shm", "checkpoints": "/mnt/ckpt"}
        claim = volumes["checkpoints"]["persistentVolumeClaim"]
        assert claim == {"claimName": "shared.nfs"}
        assert spec["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_workers": 0}, "num_workers must be at least 1; got 0"),
        ({"env": {"TF_CONFIG": "{}"}}, "TF_CONFIG is set by the manifest"),
    ],
)
def test_jobs_that_kubernetes_would_accept_but_not_train(
    options: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        TrainingJob(**{**BASE, "num_workers": 2, **options})


@pytest.mark.parametrize(
    "word",
    [
        *("1e3", "1e-3", "0x1F", "0o17", "1_000", "12:30", "2026-01-01", ".inf", "+1"),
        *("y", "No", "on", "~", "null", "=", "<<", "", " ", "-", "a: b", "a #b", "{}"),
        *("[1]", "*a", "&a", "!a", "%a", "@a", "`a", "'", '"', "it's", "a\tb", "é"),
    ],
)
def test_text_stays_text(word: str) -> None:
    text = to_yaml({"value": word, "list": [word]})
    assert yaml.safe_load(text) == {"value": word, "list": [word]}
    assert text.startswith('value: "')


@given(
    st.recursive(
        st.text() | st.booleans() | st.integers(),
        lambda parts: (
            st.lists(parts) | st.dictionaries(st.text(min_size=1, max_size=20), parts)
        ),
        max_leaves=8,
    )
)
@example("\x85")
@example(["a\u2028b\n", "\ufeff"])
def test_yaml_round_trip(value: Any) -> None:
    assert yaml.safe_load(to_yaml({"value": value})) == {"value": value}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["manifest", *arguments])


def one_line(result: Result) -> str:
    return re.sub(r"[│\s]+", " ", result.output)


def test_command_prints_a_jobset() -> None:
    result = invoke(
        *("--image", "i:1", "--workers", "3", "--name", "digits"),
        *("--gpus-per-worker", "1", "--env", "RATE=1e-3", "--env", "EMPTY="),
        *("train.py", "--name", "mine", "--workers", "x", "-m"),
    )
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(result.stdout)
    assert problems(document) == []
    assert document["metadata"] == {"name": "digits"}
    [_, (role, index, container, env), _] = pods(document)
    assert (role, index) == ("worker", 1)
    assert container["command"] == [
        *("python", "train.py", "--name", "mine", "--workers", "x", "-m")
    ]
    assert (env["RATE"], env["EMPTY"]) == ("1e-3", "")


def test_command_prints_a_jobset_of_a_module() -> None:
    result = invoke(
        *("--image", "i", "--workers", "2", "--evaluator"),
        *("--checkpoint-claim", "nfs", "-m", "pkg.train", "--epochs", "5"),
    )
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(result.stdout)
    assert problems(document) == []
    _, _, container, _ = next(pods(document))
    assert container["command"] == ["python", "-m", "pkg.train", "--epochs", "5"]
    assert container["volumeMounts"][-1]["mountPath"] == "/ckpt"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--workers", "2", "t.py"), "Missing option '--image'"),
        (("--image", "i", "t.py"), "Missing option '--workers'"),
        (("--image", "i", "--workers", "2"), "Missing argument"),
        (("--image", "i", "--workers", "0", "t.py"), "num_workers must be at least 1"),
        (("--image", "i", "--workers", "2", "--env", "A", "t.py"), "NAME=VALUE"),
        (
            ("--image", "i", "--workers", "2", "--checkpoint-path", "/c", "t.py"),
            "--checkpoint-claim",
        ),
    ],
)
def test_command_names_what_is_wrong(arguments: tuple[str, ...], named: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in one_line(result)
    assert result.stdout == ""


def documented(program: str) -> list[str]:
    """The commands of that name in the shell samples of the documentation."""
    page = Path(__file__).parents[2] / "docs" / "several-machines.md"
    samples = re.findall(
        r"^```sh\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    lines = "".join(samples).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(program)]


def test_documented_commands_print_valid_manifests() -> None:
    commands = documented("replicax manifest")
    assert commands
    for command in commands:
        words = shlex.split(command.partition("|")[0])
        result = invoke(*words[2:])
        assert result.exit_code == 0, result.output
        assert problems(yaml.safe_load(result.stdout)) == []
