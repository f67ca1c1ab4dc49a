"""MPI launchers. The script itself needs no MPI library."""

import os
import re

from replicax.cluster.environments.base import (
    ADDRESS,
    ClusterEnvironment,
    Membership,
    bracketed,
    default_port,
)

__all__ = ["OpenMPI", "ProcessManagement"]

# 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 and 13145.0;tcp6://[fd00::2]:43370
_URI = re.compile(r"(\d+)\.\d+;tcp(?:6://\[|://)([^],]+?)(?:[],]|:\d+(?:;|$))")
_URI_VARIABLE = "OMPI_MCA_orte_hnp_uri"
_NAMESPACE = re.compile(r"prterun-(.+)-(\d+)@\d+")


class OpenMPI(ClusterEnvironment):
    """`mpirun` of Open MPI 4 and 5.

    Processes of several machines meet on the machine where `mpirun` runs, as in JAX. If
    process 0 is on another machine, set `JAX_COORDINATOR_ADDRESS`.
    """

    name = "openmpi"
    index = "OMPI_COMM_WORLD_RANK"
    size = "OMPI_COMM_WORLD_SIZE"
    local = (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),)
    replaces = ("slurm",)

    def address(self, count: int) -> str:
        """Derive the coordinator's address from the job's name."""
        host, seed = "", 0
        if match := _URI.match(os.environ.get(_URI_VARIABLE, "")):
            host, seed = match[2], int(match[1]) >> 12  # Job ids differ by >= 4096.
        elif match := _NAMESPACE.fullmatch(os.environ.get("PMIX_NAMESPACE", "")):
            host, seed = match[1], int(match[2])
        if not host:
            self.require(ADDRESS, count=count)
        host = "localhost" if _is_one_host(self, count) else bracketed(host)
        return f"{host}:{default_port(seed)}"


class ProcessManagement(ClusterEnvironment):
    """PMI and PMIx: `mpiexec` of MPICH, Intel MPI and Cray PALS, and `prterun`.

    Their variables do not name process 0's host: on several machines, set
    `JAX_COORDINATOR_ADDRESS`.
    """

    name = "mpich"
    index = "PMI_RANK"
    size = "PMI_SIZE"
    local = (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    )
    replaces = ("slurm",)

    def detect(self) -> bool:
        """Whether the process was started over PMI or PMIx."""
        return super().detect() or "PMIX_RANK" in os.environ

    def membership(self) -> Membership:
        """Read the variables."""
        if "PMIX_RANK" in os.environ and not super().detect():
            self.require("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
        return super().membership()

    def address(self, count: int) -> str:
        """Derive the coordinator's address, if there is one machine."""
        if not _is_one_host(self, count):
            self.require(
                ADDRESS,
                count=count,
                remedy="Name a host and a port of the machine of process 0: mpiexec "
                f"-genv {ADDRESS} host:port.",
            )
        return f"localhost:{default_port()}"


def _is_one_host(environment: ClusterEnvironment, count: int) -> bool:
    place = environment.local_place()
    return place is not None and place[1] == count
