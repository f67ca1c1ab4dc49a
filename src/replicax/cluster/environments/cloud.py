"""Cloud services that list all machines, and run one process on each."""

import json
import os
from pathlib import Path
from typing import Any

from replicax.cluster.environments.base import (
    ALONE,
    ClusterEnvironment,
    Membership,
    bracketed,
    default_port,
)
from replicax.errors import ClusterConfigError

__all__ = ["SageMaker", "SkyPilot", "VertexAI"]


class SageMaker(ClusterEnvironment):
    """A training job of Amazon SageMaker: `SM_HOSTS`, or the resource file."""

    name = "sagemaker"
    index = "SM_CURRENT_HOST"
    size = "SM_HOSTS"
    resources = Path("/opt/ml/input/config/resourceconfig.json")

    def detect(self) -> bool:
        """Whether the variables or the file exist."""
        return super().detect() or self.resources.exists()

    def membership(self) -> Membership:
        """Read the hosts."""
        if super().detect():
            self.require(self.size, self.index)
            hosts, own = _json(self, self.size), os.environ[self.index]
        else:
            config = json.loads(self.resources.read_text(encoding="utf-8"))
            hosts, own = config["hosts"], config["current_host"]
        if not isinstance(hosts, list) or own not in hosts:
            raise ClusterConfigError(
                f"sagemaker: this host must be one of the job's hosts, {hosts}; got "
                f"{own!r}. Correct SM_HOSTS and SM_CURRENT_HOST. {ALONE}"
            )
        port = default_port()
        return self.workers(hosts.index(own), [f"{host}:{port}" for host in hosts])


class VertexAI(ClusterEnvironment):
    """A custom job of Vertex AI: `CLUSTER_SPEC`, whose pools 0 and 1 are the workers.

    Parameter servers and evaluators, in pools 2 and 3, need `TF_CONFIG`.
    """

    name = "vertex"
    index = "CLUSTER_SPEC"

    def membership(self) -> Membership:
        """Parse the variable."""
        spec = _json(self, self.index)
        try:
            pools: dict[str, list[str]] = dict(spec["cluster"])
            own = pools[spec["task"]["type"]][int(spec["task"]["index"])]
            addresses = [*pools["workerpool0"], *pools.get("workerpool1", ())]
            index = addresses.index(own)
        except (LookupError, TypeError, ValueError) as error:
            raise ClusterConfigError(
                "vertex: CLUSTER_SPEC must have 'cluster' with 'workerpool0', and "
                "'task' with 'type' and 'index' of a replica in 'workerpool0' or "
                f"'workerpool1'; got {spec!r}. {ALONE}"
            ) from error
        return self.workers(index, addresses)


class SkyPilot(ClusterEnvironment):
    """A task of SkyPilot on one or several nodes."""

    name = "skypilot"
    index = "SKYPILOT_NODE_RANK"
    size = "SKYPILOT_NUM_NODES"
    host = "SKYPILOT_NODE_IPS"

    def membership(self) -> Membership:
        """Read the variables."""
        self.require(self.index, self.host)
        hosts, port = os.environ[self.host].split(), default_port()
        if os.environ.get(self.size):
            self.number(self.size, len(hosts), len(hosts))
        index = self.number(self.index, 0, len(hosts) - 1)
        return self.workers(index, [f"{bracketed(host)}:{port}" for host in hosts])


def _json(environment: ClusterEnvironment, name: str) -> Any:
    try:
        return json.loads(os.environ[name])
    except ValueError as error:
        raise ClusterConfigError(
            f"{environment.name}: {name} must be JSON; got {os.environ[name]!r}. "
            f"Correct the variable. {ALONE}"
        ) from error
