"""Reads the rank, world size and hosts from Open MPI's variables and PMIx server, without MPI.

Sources: Open MPI's documentation on the environment variables of each MPI process; the PMIx 4
standard, chapters on PMIx_Init, PMIx_Get and reserved keys; pmix_common.h for the layouts of
pmix_proc_t and pmix_value_t and for the numeric values of types and special ranks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from glob import glob
from typing import Any, NamedTuple

from headway.ipc.numbering import NUMBERINGS, Environ
from headway.ipc.run_contract import Ranks
from headway.launcher.clusters.kinds import ClusterKind, entry_of, origin_of, port_from, unreadable
from headway.settings.profile import Entries, Entry

_SIZE, _RANK = NUMBERINGS["mpi"].size, NUMBERINGS["mpi"].rank
_LOCAL_SIZE, _LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
_NAMESPACE = "PMIX_NAMESPACE"
_STRING, _UINT32 = 3, 14
_ANY_RANK = 0xFFFFFFFE  # PMIX_RANK_WILDCARD: for keys of the whole job
_NAME = "libpmix.so.2"


def _derive(environ: Environ) -> Entries:
    try:
        return _settings_of(environ)
    except (ValueError, KeyError, OSError) as error:
        return unreadable(_SIZE, "cannot read the hosts from mpirun", error)


def _settings_of(environ: Environ) -> Entries:
    size = int(environ[_SIZE])
    if size == 1:
        return {"num_machines": Entry("1", origin_of(_SIZE))}
    local_size = int(environ[_LOCAL_SIZE])
    port = Entry(port_from(environ[_NAMESPACE]), origin_of(_NAMESPACE, "port derived from it"))
    if size == local_size:
        return {
            "num_machines": Entry("1", origin_of(_LOCAL_SIZE)),
            "num_processes": entry_of(environ, _LOCAL_SIZE),
            "main_port": port,
        }
    job, reported = ask_server(), origin_of(_NAMESPACE, "reported by mpirun")
    entries = {
        "main_port": port,
        "num_machines": Entry(str(job.num_nodes), reported),
        "machine_rank": Entry(str(job.node), reported),
        "main_address": Entry(job.first_host, reported),
    }
    if job.num_nodes == size:
        return {**entries, "machine_rank": entry_of(environ, _RANK)}
    return {**entries, "num_processes": entry_of(environ, _LOCAL_SIZE)}


def _task(environ: Environ) -> Ranks | None:
    size = int(environ[_SIZE])
    if size == 1:
        return None
    local_size = int(environ[_LOCAL_SIZE])
    if size != local_size and ask_server().num_nodes == size:
        return None
    return Ranks(int(environ[_RANK]), int(environ[_LOCAL_RANK]), size, local_size)


MPI = ClusterKind(
    "mpi",
    lambda environ: _SIZE in environ,
    {},
    _derive,
    _task,
    overrides=("slurm", "kubernetes"),  # their variables describe mpirun's own process
)


# ------------------------------------------------------------------ PMIx


class MpiJob(NamedTuple):
    first_host: str  # of rank 0
    num_nodes: int
    node: int  # index of this node, from 0


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", ctypes.c_void_p * 8))


@cache  # one query per process
def ask_server() -> MpiJob:
    """Ask the PMIx server for the job's nodes, in about 40 ms; raise OSError if that fails."""
    library, me, nothing = _load(), _Process(), ctypes.c_size_t(0)
    status = library.PMIx_Init(ctypes.byref(me), None, nothing)
    if status:
        raise OSError(f"PMIx_Init returned {status}")
    try:
        return MpiJob(
            _get(library, me, 0, "pmix.hname"),
            _get(library, me, _ANY_RANK, "pmix.num.nodes"),
            _get(library, me, me.rank, "pmix.nodeid"),
        )
    finally:
        library.PMIx_Finalize(None, nothing)


def _get(library: ctypes.CDLL, me: _Process, rank: int, key: str) -> Any:
    process = _Process(me.namespace, rank)
    found = ctypes.POINTER(_Value)()
    status = library.PMIx_Get(
        ctypes.byref(process), key.encode(), None, ctypes.c_size_t(0), ctypes.byref(found)
    )
    if status:
        raise OSError(f"PMIx_Get for {key} returned {status}")
    value = found.contents
    if value.type == _STRING:
        return ctypes.string_at(value.data[0]).decode()
    if value.type == _UINT32:
        return ctypes.c_uint32.from_buffer(value.data).value
    raise OSError(f"{key} has type {value.type}")


def _load() -> ctypes.CDLL:
    errors = []
    for path in _places():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            errors.append(str(error))
    raise OSError(errors[0])


def _places() -> Iterator[str]:
    yield _NAME
    yield from glob(f"/usr/lib/*/pmix2/lib/{_NAME}")
    for folder in os.get_exec_path():
        if os.path.exists(os.path.join(folder, "mpirun")):
            yield os.path.join(os.path.dirname(folder), "lib", _NAME)
