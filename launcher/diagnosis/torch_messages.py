"""Messages of other programs that the launcher recognizes, each with its source.

"torch 2.13.0" refers to the CPU build for Linux. The messages of NCCL, CUDA and MPS, which this
build does not contain, are from torch's source files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple


class Text(NamedTuple):
    text: str
    source: str  # program, version and file


DEBUGGER_LEFT = Text("BdbQuit", "Python 3.11, Lib/bdb.py: q, or the end of standard input")
OUT_OF_MEMORY_ERROR = Text("OutOfMemoryError", "torch 2.13.0, torch.OutOfMemoryError")
OUT_OF_MEMORY = (
    Text("out of memory", "torch sources, CUDACachingAllocator.cpp and MPSAllocator.mm"),
)
OUT_OF_CPU_MEMORY = (Text("can't allocate memory", "torch 2.13.0, libc10.so (alloc_cpu.cpp)"),)
LOADER_WORKER_KILLED = (
    Text("is killed by signal: Killed", "torch 2.13.0, libtorch_python.so (DataLoader.cpp)"),
)
LOADER_WORKER_ENDED = (
    *LOADER_WORKER_KILLED,
    Text(
        ") exited unexpectedly", "torch 2.13.0, utils/data/dataloader.py: DataLoader worker (pid(s)"
    ),
)
NO_NCCL = (
    Text("doesn't have NCCL built in", "torch 2.13.0, distributed/distributed_c10d.py"),
    Text("ProcessGroupNCCL is only supported with GPUs", "torch sources, ProcessGroupNCCL.cpp"),
)
NO_INTERFACE = (
    Text("Unable to find address for", "torch 2.13.0, libtorch_cpu (gloo/transport/tcp/device.cc)"),
)
NO_GPU = (
    Text("Torch not compiled with CUDA enabled", "torch 2.13.0, cuda/__init__.py"),
    Text("has no attribute '_cuda_", "torch 2.13.0's CPU build: torch.cuda.set_device(0)"),
    Text(
        "no NVIDIA driver on your system", "torch sources, cuda/__init__.py and CUDAFunctions.cpp"
    ),
    Text("No CUDA GPUs are available", "torch sources, CUDAFunctions.cpp"),
)
DEVICE_IDS_ON_CPU = (
    Text("or CPU modules, but got device_ids", "torch 2.13.0, nn/parallel/distributed.py"),
)
MISMATCHED_PACKAGES = (
    Text("operator torchvision::nms does not exist", "torchvision 0.20, beside another torch"),
    Text("torchvision has different CUDA versions", "torchvision 0.20, extension.py"),
)
MIXED_TENSORS = (
    Text("got mixed torch.Tensor and DTensor", "torch 2.13.0, distributed/tensor/_dispatch.py"),
)
EMPTY_SHARD = (Text("infinity norm on an empty tensor", "torch 2.13.0, _foreach_norm"),)
NO_DTYPE = (Text("Invalid scalar type", "torch 2.13.0, ProcessGroupGloo.cpp"),)
NO_KERNELS = (
    Text("no kernel image is available", "CUDA's runtime API, cudaErrorNoKernelImageForDevice"),
)
SHARED_MEMORY_FULL = (
    Text("unable to allocate shared memory(shm)", "torch 2.13.0, libtorch_cpu (MapAllocator.cpp)"),
    Text("workers are out of shared memory", "torch 2.13.0, libtorch_python.so (DataLoader.cpp)"),
)
NEW_SEMAPHORE = Text("_multiprocessing.SemLock(", "Python 3.11, multiprocessing/synchronize.py")
DISK_FULL = Text(os.strerror(errno.ENOSPC), "errno(3)")
UNWRITTEN = (
    Text("] . unexpected pos ", "torch 2.13.0, inline_container.cc: torch.save to a full disk"),
    Text("PytorchStreamWriter failed writing", "torch 2.13.0, inline_container.cc"),
)
WRAPPED_MODEL = (Text("'DistributedDataParallel' object has no attribute", "torch 2.13.0, Module"),)
NO_INPUT = (Text("EOF when reading a line", "Python 3.11, Python/bltinmodule.c: input()"),)
NO_TEMPORARY_FOLDER = (Text("No usable temporary directory", "Python 3.11, Lib/tempfile.py"),)
NO_MAPPING = (Text("failed to map segment", "glibc 2.36, elf/dl-load.c: no address space"),)
NO_THREAD = (
    Text("can't start new thread", "Python 3.11, Modules/_threadmodule.c"),
    Text(os.strerror(errno.EAGAIN), "fork(2), pthread_create(3)"),
)
COMMUNICATION_ERRORS = (
    Text("DistBackendError", "torch 2.13.0, torch.distributed.DistBackendError"),
    Text("DistNetworkError", "torch 2.13.0, torch.distributed.DistNetworkError"),
    Text("DistStoreError", "torch 2.13.0, torch.distributed.DistStoreError"),
)
COMMUNICATION = (
    Text("/gloo/", "gloo in torch 2.13.0: messages start with the source file"),
    Text("Gloo ", "torch 2.13.0, ProcessGroupGloo.cpp: Gloo connectFullMesh failed with"),
    Text("NCCL error", "torch sources, NCCLUtils.hpp"),
    Text("NCCL communicator", "torch sources, ProcessGroupNCCL.cpp"),
    Text("WorkNCCL", "torch sources, ProcessGroupNCCL.cpp"),
    Text("monitoredBarrier", "torch 2.13.0, ProcessGroupGloo.cpp"),
    Text("Connection closed by peer", "gloo in torch 2.13.0, transport/tcp/pair.cc"),
)
EQUAL_SIZE_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "allreduce")
"""Collectives with equal input sizes on all ranks, as named in torch 2.13.0's flight recorder."""

RANK_PREFIX = Text(
    "[rank{rank}]:", "torch 2.13.0, distributed/distributed_c10d.py and _logging/_internal.py"
)

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


def contains(message: str, texts: Iterable[Text]) -> bool:
    return any(text.text in message for text in texts)
