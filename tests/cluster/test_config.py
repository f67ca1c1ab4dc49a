"""TF_CONFIG: its forms, and the error that names its first problem."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.cluster.config import JOBS, TaskConfig, check_cluster, tf_config
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

WORKERS = {"worker": ["a:1", "b:1"]}


def document(cluster: Any, job: Any = "worker", index: Any = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def problem_of(text: str, **options: Any) -> str:
    with pytest.raises(ClusterConfigError) as caught:
        tf_config(text, **options)
    assert str(caught.value).startswith(f"TF_CONFIG: {caught.value.problem}.\n")
    return caught.value.problem


def test_a_cluster_and_a_task() -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "[fd00::1]:1"], "ps": ["c:1"]}
    config = tf_config(document(cluster, "worker", 1))
    assert config.cluster == ClusterSpec(cluster)
    assert (config.task_type, config.task_id) == ("worker", 1)
    assert config.name == "worker:1"
    assert config.process_id == 2
    assert tf_config(document(cluster, "ps", 0)).process_id is None


def test_a_quoted_index() -> None:
    assert tf_config(document(WORKERS, index="1")).task_id == 1


@pytest.mark.parametrize("text", ["{}", '{"cluster": {}}', '{"task": {}}'])
def test_neither_cluster_nor_task_is_one_machine(text: str) -> None:
    assert tf_config(text) == TaskConfig(cluster=ClusterSpec({}))


def test_an_evaluator_need_not_be_listed() -> None:
    config = tf_config(document(WORKERS, "evaluator"))
    assert config.name == "evaluator:0"
    assert config.process_id is None


def test_unknown_keys_are_ignored() -> None:
    text = document(WORKERS)[:-1] + ', "environment": "cloud", "rpc_layer": "grpc"}'
    assert tf_config(text).cluster == ClusterSpec(WORKERS)


def test_the_task_may_be_overridden() -> None:
    config = tf_config(json.dumps({"cluster": WORKERS}), task_type="worker", task_id=1)
    assert config.name == "worker:1"
    assert "out of range" in problem_of(document(WORKERS), task_id=2)


def test_a_cluster_on_this_machine() -> None:
    cluster = {"worker": ["localhost:1", "127.0.0.1:2", "[::1]:3"]}
    assert tf_config(document(cluster)).cluster == ClusterSpec(cluster)


FAULTS = [
    ("{oops", "not valid JSON: .*: line 1 column 2"),
    ("[1]", r"it is not a JSON object; got \[1\]"),
    ("null", "it is not a JSON object; got None"),
    ('{"cluster": {"worker": ["a:1"]}}', "'task' must have .* type=None, index=None"),
    ('{"task": {"type": "worker", "index": 0}}', "'cluster' is missing"),
    (document({}), "'cluster' has no jobs"),
    (document([]), r"'cluster' is not a JSON object; got \[\]"),
    (json.dumps({"cluster": WORKERS, "task": "worker"}), "'task' is not a JSON obj"),
    (json.dumps({"cluster": WORKERS, "task": {"index": 0}}), "got type=None, index=0"),
    (
        json.dumps({"cluster": WORKERS, "task": {"type": "worker"}}),
        "type='worker', index=None",
    ),
    (document({**WORKERS, "wroker": ["c:1"]}), "'wroker' is no job; there are chief"),
    (document({**WORKERS, "master": ["c:1"]}), "'master' .* write 'chief'"),
    (document(WORKERS, "Workers"), "type 'Workers' is no job; there are"),
    (document(WORKERS, ["worker"]), r"type \['worker'\] is no job; there are"),
    (document(WORKERS, "chief"), "is a chief, but the cluster has none; .* 'worker'"),
    (document(WORKERS, index=2), "index 2 is out of range; job 'worker' has 2 tasks"),
    (document(WORKERS, index=-1), "not an integer from zero up; got -1"),
    (document(WORKERS, index=0.0), "not an integer from zero up; got 0.0"),
    (document(WORKERS, index=True), "not an integer from zero up; got True"),
    (document(WORKERS, index="one"), "not an integer from zero up; got 'one'"),
    (document({"worker": "a:1"}), "job 'worker' is not a list .* got 'a:1'"),
    (document({"worker": {"0": "a:1"}}), "job 'worker' is not a list"),
    (document({**WORKERS, "ps": []}), "job 'ps' has no tasks"),
    (document({"worker": ["a:1", "b"]}), "address 'b' of worker:1: it has no port"),
    (document({"worker": ["a:1", 7]}), "address 7 of worker:1: it is not a string"),
    (document({"worker": ["a:1", ":1"]}), "address ':1' of worker:1: it has no host"),
    (document({**WORKERS, "chief": ["c:1", "d:1"]}), "only one chief; got 2"),
    (document({**WORKERS, "evaluator": ["c:1", "d:1"]}), "only one evaluator; got 2"),
    (
        document({"worker": ["a:1", "localhost:1"]}),
        r"other machines cannot reach worker:1 \('localhost:1'\)",
    ),
]


@pytest.mark.parametrize(("text", "problem"), FAULTS)
def test_one_fault(text: str, problem: str) -> None:
    assert re.search(problem, problem_of(text))


def test_the_cluster_is_checked_before_the_task() -> None:
    text = document({"wroker": ["a:1"], "worker": ["b"]}, "wrk")
    assert problem_of(text).startswith("'wroker' is no job;")


def test_the_message_shows_the_value_and_an_example() -> None:
    with pytest.raises(ClusterConfigError, match=r"(?s)It is '\{oops'.*example \{"):
        tf_config("{oops")
    with pytest.raises(ClusterConfigError) as caught:
        tf_config("x" * 100_000)
    assert len(str(caught.value)) < 600


def test_no_parameter_servers_where_they_are_not_allowed() -> None:
    cluster = tf_config(document({**WORKERS, "ps": ["c:1"]})).cluster
    assert check_cluster(cluster, "worker", 0).cluster.num_tasks("ps") == 1
    match = (
        r"only ParameterServerStrategy uses; use rx\.ParameterServerStrategy\(\), or"
    )
    with pytest.raises(ClusterConfigError, match=match):
        check_cluster(cluster, "worker", 0, allow_ps=False)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "1" * 5_000, '{"cluster": {"worker": ' + "[" * 900 + "]" * 900],
    ids=["depth", "digits", "unclosed"],
)
def test_extreme_json(text: str) -> None:
    problem_of(text)
    problem_of(text + "}}")


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=4)
        ),
        max_leaves=12,
    )


KEYS = ["cluster", "task", "type", "index", *JOBS, "wroker"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["worker", "a:1", "b:2", "localhost:3", "[::1]:4", "c", "1"])
)
VALUES = nested(LEAVES)


@settings(max_examples=300)
@given(
    VALUES
    | st.fixed_dictionaries(
        {
            "cluster": VALUES
            | st.dictionaries(
                st.sampled_from(KEYS), st.lists(LEAVES, max_size=3), max_size=3
            ),
            "task": VALUES | st.fixed_dictionaries({"type": LEAVES, "index": LEAVES}),
        }
    )
)
def test_any_json_value_is_a_config_or_a_config_error(value: Any) -> None:
    config = outcome(json.dumps(value))
    if isinstance(config, ClusterConfigError):
        assert config.problem
        assert str(config).encode("utf-8")  # Can be printed.
        return
    assert set(config.cluster.jobs) <= set(JOBS)
    if config.cluster:
        again = document(config.cluster.as_dict(), config.task_type, config.task_id)
        assert tf_config(again) == config


@given(st.text())
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    assert isinstance(outcome(text), TaskConfig | ClusterConfigError)


def outcome(text: str) -> TaskConfig | ClusterConfigError:
    try:
        return tf_config(text)
    except ClusterConfigError as error:
        return error


def test_check_cluster() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b"]})
    with pytest.raises(ClusterConfigError, match=r"^here: address 'b'") as caught:
        check_cluster(spec, "worker", 1, source="here")
    assert "ClusterSpec({'worker'" in str(caught.value)
    assert check_cluster(ClusterSpec(WORKERS), "worker", 1).process_id == 1
    assert check_cluster(ClusterSpec({}), None, None).name is None


def test_gaps_between_tasks() -> None:
    with pytest.raises(ClusterConfigError, match="'worker' is not a list"):
        check_cluster(ClusterSpec({"worker": {0: "a:1", 2: "b:1"}}), "worker", 0)
