"""Cluster resolvers: what each says of the cluster and of this process."""

import json

import jax
import pytest

from replicax.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    default_resolver,
)
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def set_tf_config(
    monkeypatch: pytest.MonkeyPatch, job: str = "worker", index: int = 1
) -> None:
    value = {"cluster": CLUSTER, "task": {"type": job, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(value))


def test_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "c:1"
    assert resolver.master("ps", 0, rpc_layer="grpc") == "grpc://d:1"
    assert resolver.environment == ""


def test_tf_config_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch)
    resolver = TFConfigClusterResolver()
    monkeypatch.setenv("TF_CONFIG", "{oops")
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert resolver.task_id == 1


def test_tf_config_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch)
    resolver = TFConfigClusterResolver("chief", 0, "grpc", "cloud")
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolver.master() == "grpc://a:1"
    assert resolver.environment == "cloud"


@pytest.mark.parametrize("text", [None, "", " \n", "{}"])
def test_without_tf_config_there_is_one_machine(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.master() == ""
    assert "worker" not in repr(resolver)


def test_the_only_task_has_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(value))
    assert TFConfigClusterResolver().master() == ""


def test_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_resolver() is None
    monkeypatch.setenv("TF_CONFIG", "  ")
    assert default_resolver() is None
    set_tf_config(monkeypatch)
    resolver = default_resolver()
    assert resolver is not None
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    monkeypatch.setenv("TF_CONFIG", "[]")
    with pytest.raises(ClusterConfigError, match="not a JSON object"):
        default_resolver()


def test_simple() -> None:
    resolver = SimpleClusterResolver(
        ClusterSpec(CLUSTER), "m:1", "worker", 0, "cloud", {"GPU": 3}, "grpc"
    )
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 1, "http") == "http://c:1"
    assert resolver.environment == "cloud"
    assert resolver.num_accelerators() == {"GPU": 3}
    assert SimpleClusterResolver(ClusterSpec({})).master() == ""


def test_accelerators_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tf_config(monkeypatch)
    resolver = TFConfigClusterResolver()
    devices = [d for d in jax.local_devices() if d.platform != "cpu"]
    expected = {devices[0].platform.upper(): len(devices)} if devices else {}
    assert resolver.num_accelerators() == expected
    assert resolver.num_accelerators("worker", 1) == expected
    with pytest.raises(ValueError, match="of this process, worker:1, are known"):
        resolver.num_accelerators("worker", 0)
    with pytest.raises(ValueError, match="task_type='ps'"):
        resolver.num_accelerators("ps")


def test_a_resolver_of_the_users() -> None:
    class Mine(ClusterResolver):
        task_type = "worker"
        task_id = 1

        def cluster_spec(self) -> ClusterSpec:
            return ClusterSpec(CLUSTER)

    assert Mine().master() == "c:1"
    assert repr(Mine()).startswith("Mine(ClusterSpec({'chief'")
