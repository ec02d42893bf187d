"""What mpirun of Open MPI says of a process that it has started.

Source: Open MPI's documentation, environment variables that are defined for each MPI process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.contract.numbering import NUMBERINGS
from headway.contract.run import Ranks
from headway.launcher.clusters.row import Cluster, Environ, port_from, said_by, unreadable
from headway.settings.profile import Entries, Entry

if TYPE_CHECKING:
    from headway.launcher.clusters.pmix import Job

_SIZE, _RANK = NUMBERINGS["mpi"].size, NUMBERINGS["mpi"].rank
_LOCAL_SIZE, _LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
_NAMESPACE = "PMIX_NAMESPACE"


def _derive(environ: Environ) -> Entries:
    try:
        return _place(environ)
    except (ValueError, KeyError, OSError) as error:
        return unreadable(_SIZE, "mpirun does not say where its machines are", error)


def _place(environ: Environ) -> Entries:
    size = int(environ[_SIZE])
    if size == 1:
        return {"num_machines": Entry("1", said_by(_SIZE))}
    local_size = int(environ[_LOCAL_SIZE])
    port = Entry(port_from(environ[_NAMESPACE]), said_by(_NAMESPACE, "a port from its text"))
    if size == local_size:
        count = Entry(str(size), said_by(_LOCAL_SIZE))
        return {
            "num_machines": Entry("1", said_by(_LOCAL_SIZE)),
            "num_processes": count,
            "main_port": port,
        }
    job = _ask_server()
    entries = {
        "main_port": port,
        "num_machines": Entry(str(job.num_nodes), said_by(_NAMESPACE, "mpirun answers")),
        "machine_rank": Entry(str(job.node), said_by(_NAMESPACE, "mpirun answers")),
        "main_address": Entry(job.first_host, said_by(_NAMESPACE, "mpirun answers")),
    }
    if job.num_nodes == size:
        entries["machine_rank"] = Entry(environ[_RANK], said_by(_RANK))
        return entries
    return {**entries, "num_processes": Entry(str(local_size), said_by(_LOCAL_SIZE))}


def _ask_server() -> Job:
    from headway.launcher.clusters.pmix import ask_server  # needs ctypes, which nothing else does

    return ask_server()


def _task(environ: Environ) -> Ranks | None:
    size = int(environ[_SIZE])
    if size == 1:
        return None
    local_size = int(environ[_LOCAL_SIZE])
    if size != local_size and _ask_server().num_nodes == size:
        return None
    return Ranks(int(environ[_RANK]), int(environ[_LOCAL_RANK]), size, local_size)


MPI = Cluster(
    "mpi",
    lambda environ: _SIZE in environ,
    {},
    _derive,
    _task,
    hides=("slurm", "kubernetes"),  # whose variables are those of the process that mpirun runs in
)
