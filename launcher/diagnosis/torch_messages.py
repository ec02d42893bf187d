"""Messages of other programs that the launcher recognizes, each with its source.

"torch 2.13.0" refers to the CPU build for Linux. The messages of NCCL, CUDA and MPS, which this
build does not contain, are from torch's source files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

DEBUGGER_LEFT = "BdbQuit"  # Python 3.11, Lib/bdb.py: q, or the end of standard input
OUT_OF_MEMORY_ERROR = "OutOfMemoryError"  # torch 2.13.0, torch.OutOfMemoryError
OUT_OF_MEMORY = ("out of memory",)  # torch sources, CUDACachingAllocator.cpp and MPSAllocator.mm
OUT_OF_CPU_MEMORY = ("can't allocate memory",)  # torch 2.13.0, libc10.so (alloc_cpu.cpp)
# torch 2.13.0, libtorch_python.so (DataLoader.cpp)
LOADER_WORKER_KILLED = ("is killed by signal: Killed",)
LOADER_WORKER_ENDED = (
    *LOADER_WORKER_KILLED,
    ") exited unexpectedly",  # torch 2.13.0, utils/data/dataloader.py: DataLoader worker (pid(s)
)
NO_NCCL = (
    "doesn't have NCCL built in",  # torch 2.13.0, distributed/distributed_c10d.py
    "ProcessGroupNCCL is only supported with GPUs",  # torch sources, ProcessGroupNCCL.cpp
)
# torch 2.13.0, libtorch_cpu (gloo/transport/tcp/device.cc)
NO_INTERFACE = ("Unable to find address for",)
NO_GPU = (
    "Torch not compiled with CUDA enabled",  # torch 2.13.0, cuda/__init__.py
    "has no attribute '_cuda_",  # torch 2.13.0's CPU build: torch.cuda.set_device(0)
    "no NVIDIA driver on your system",  # torch sources, cuda/__init__.py and CUDAFunctions.cpp
    "No CUDA GPUs are available",  # torch sources, CUDAFunctions.cpp
)
# torch 2.13.0, distributed/c10d/reducer.cpp
UNUSED_PARAMETERS = ("Expected to have finished reduction in the prior iteration",)
SECOND_BACKWARD = ("Expected to mark a variable ready only once",)
ONE_SAMPLE = ("Expected more than 1 value per channel",)  # torch 2.13.0, nn/functional.py
OTHER_COLLECTIVE = ("op.preamble.length <= op.nbytes",)  # gloo in torch 2.13.0, tcp/pair.cc
# torch 2.13.0, nn/parallel/distributed.py
DEVICE_IDS_ON_CPU = ("or CPU modules, but got device_ids",)
MISMATCHED_PACKAGES = (
    "operator torchvision::nms does not exist",  # torchvision 0.20, beside another torch
    "torchvision has different CUDA versions",  # torchvision 0.20, extension.py
)
# torch 2.13.0, distributed/tensor/_dispatch.py
MIXED_TENSORS = ("got mixed torch.Tensor and DTensor",)
EMPTY_SHARD = ("infinity norm on an empty tensor",)  # torch 2.13.0, _foreach_norm
NO_DTYPE = ("Invalid scalar type",)  # torch 2.13.0, ProcessGroupGloo.cpp
# CUDA's runtime API, cudaErrorNoKernelImageForDevice
NO_KERNELS = ("no kernel image is available",)
SHARED_MEMORY_FULL = (
    "unable to allocate shared memory(shm)",  # torch 2.13.0, libtorch_cpu (MapAllocator.cpp)
    "workers are out of shared memory",  # torch 2.13.0, libtorch_python.so (DataLoader.cpp)
)
NEW_SHARED_OBJECT = (
    "_multiprocessing.SemLock(",  # Python 3.11, multiprocessing/synchronize.py
    "unable to open shared memory object",  # torch 2.13.0, libtorch_cpu (MapAllocator.cpp)
)
DISK_FULL = os.strerror(errno.ENOSPC)  # errno(3), like the next two messages
UNUSABLE_FOLDER = (DISK_FULL, os.strerror(errno.ENOENT), os.strerror(errno.EROFS))
UNWRITTEN = (
    "] . unexpected pos ",  # torch 2.13.0, inline_container.cc: torch.save to a full disk
    "PytorchStreamWriter failed writing",  # torch 2.13.0, inline_container.cc
)
WRAPPED_MODEL = ("'DistributedDataParallel' object has no attribute",)  # torch 2.13.0, Module
NO_INPUT = ("EOF when reading a line",)  # Python 3.11, Python/bltinmodule.c: input()
NO_TEMPORARY_FOLDER = ("No usable temporary directory",)  # Python 3.11, Lib/tempfile.py
NO_MAPPING = ("failed to map segment",)  # glibc 2.36, elf/dl-load.c: no address space
NO_THREAD = (
    "can't start new thread",  # Python 3.11, Modules/_threadmodule.c
    os.strerror(errno.EAGAIN),  # fork(2), pthread_create(3)
)
COMMUNICATION_ERRORS = (
    "DistBackendError",  # torch 2.13.0, torch.distributed.DistBackendError
    "DistNetworkError",  # torch 2.13.0, torch.distributed.DistNetworkError
    "DistStoreError",  # torch 2.13.0, torch.distributed.DistStoreError
)
COMMUNICATION = (
    "/gloo/",  # gloo in torch 2.13.0: messages start with the source file
    "Gloo ",  # torch 2.13.0, ProcessGroupGloo.cpp: Gloo connectFullMesh failed with
    "NCCL error",  # torch sources, NCCLUtils.hpp
    "NCCL communicator",  # torch sources, ProcessGroupNCCL.cpp
    "WorkNCCL",  # torch sources, ProcessGroupNCCL.cpp
    "monitoredBarrier",  # torch 2.13.0, ProcessGroupGloo.cpp
    "Connection closed by peer",  # gloo in torch 2.13.0, transport/tcp/pair.cc
)
EQUAL_SIZE_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "allreduce")
"""Collectives with equal input sizes on all ranks, as named in torch 2.13.0's flight recorder."""

# torch 2.13.0, distributed/distributed_c10d.py and _logging/_internal.py
RANK_PREFIX = "[rank{rank}]:"

# Python 3.11, Python/traceback.c and Modules/faulthandler.c
STACK_HEADER = "(most recent call first)"
STACK_FRAME = r'  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<function>.*)'  # no comma there
FATAL_ERROR = "Fatal Python error: "
CRASHED_THREAD = "Current thread"  # if all threads are shown
CODE_OF_DASH_C = "<string>"  # the file name of the code of `python -c`

# Python 3.11, Lib/threading.py: called by the main thread at exit to join other threads
JOINING_THREADS = ("threading.py", "_shutdown")

# Linux, proc(5): a field of /proc/PID/status
STATE = "State"
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "exited, not yet reaped",
}
STOPPED_STATES = ("T", "t")


def contains(message: str, texts: Iterable[str]) -> bool:
    return any(text in message for text in texts)
