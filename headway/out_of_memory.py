"""Which exceptions mean that a device or the machine has no memory left."""

from __future__ import annotations

import torch

TEXTS = (  # parts of the messages of torch's RuntimeErrors, each with its source
    "out of memory",  # CUDA, HIP and MPS: c10/cuda/CUDACachingAllocator.cpp, MPSAllocator.mm
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory",  # the same, on Windows
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN finds no algorithm that fits into what is left
    "CUDNN_STATUS_ALLOC_FAILED",  # cuDNN's own allocation
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS's workspace
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` would not occur with a smaller batch: memory was used up."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
