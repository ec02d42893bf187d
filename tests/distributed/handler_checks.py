"""What handlers and states do on one of several ranks; see runtime_worker.py."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headway import Accelerator
from headway.errors import MachineError, UsageError
from headway.state import AcceleratorState, PartialState
from headway.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from tests.distributed.this_rank import FOLDER, RANK, WORLD


def states() -> dict[str, Any]:
    state = PartialState()
    accelerator = Accelerator()
    return {
        "place": [state.process_index, state.num_processes, state.local_process_index],
        "flags": [state.is_main_process, state.is_last_process, state.use_distributed],
        "same": state.world.ranks == accelerator.parts.process.world.ranks,
        "backend": AcceleratorState().backend,
        "text": repr(accelerator.state).split("\n"),
        "last": accelerator.on_last_process(lambda: RANK)(),
        "local": state.on_local_process(lambda: RANK, local_process_index=0)(),
    }


def parts() -> dict[str, Any]:
    accelerator, letters = Accelerator(), list("abcd")
    found = {}
    for name, inputs, pads in (
        ("list", letters, False),
        ("padded", letters, True),
        ("tuple", tuple(letters), True),
        ("tensor", torch.arange(4), True),
        ("dict", {"x": letters, "deep": {"y": torch.arange(8).view(4, 2)}}, False),
        ("few", ["only"], False),
    ):
        with accelerator.split_between_processes(inputs, apply_padding=pads) as part:
            found[name] = part
    found["tensor"] = found["tensor"].tolist()
    found["dict"]["deep"]["y"] = found["dict"]["deep"]["y"].tolist()
    return found


def triggers() -> list[bool]:
    accelerator = Accelerator()
    found = [accelerator.check_trigger()]
    if RANK == WORLD - 1:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


def unused_parameters() -> dict[str, bool]:
    """Whether two steps work with a layer that the first forward pass leaves out."""
    return {
        str(finds): _trains_partly(DistributedDataParallelKwargs(find_unused_parameters=finds))
        for finds in (False, True)
    }


def _trains_partly(handler: DistributedDataParallelKwargs) -> bool:
    accelerator = Accelerator(kwargs_handlers=[handler])

    class Partly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    model = accelerator.prepare(Partly())
    with contextlib.suppress(RuntimeError):
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
        return True
    return False


def gradients_by_hook() -> dict[str, Any]:
    """The mean over ranks of the gradient 1.01 * (rank + 1), as each hook computes it."""
    found: dict[str, Any] = {}
    for hook in DDPCommunicationHookType:
        handler = DistributedDataParallelKwargs(comm_hook=hook)
        if hook.value.endswith("power_sgd"):
            handler.comm_state_option = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
        accelerator = Accelerator(kwargs_handlers=[handler])
        try:
            model = accelerator.prepare(torch.nn.Linear(4, 4, bias=False))
        except (MachineError, UsageError):
            found[str(hook)] = "refused"
            continue
        for _ in range(4):
            model.zero_grad()
            accelerator.backward(model(torch.full((1, 4), 1.01 * (RANK + 1))).sum())
        gradient = next(model.parameters()).grad
        found[str(hook)] = gradient.flatten()[0].item()
    return found


def _timeout() -> float:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return float(backend.options._timeout.total_seconds())


def timeout_of_the_group() -> list[float]:
    """The timeouts of the default group as it stands, and after a handler with another."""
    found = []
    for handlers in ([], [InitProcessGroupKwargs(timeout=timedelta(seconds=77))]):
        Accelerator(kwargs_handlers=handlers)
        if WORLD > 1:
            found.append(_timeout())
    return found


def other_backend() -> bool:
    """Whether a backend that the group does not have is refused."""
    try:
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="mpi")])
    except UsageError:
        return True
    return False


def exchanged_micro_batches() -> dict[str, list[bool]]:
    """Whether the ranks' gradients agree after each of four micro-batches, two to a step."""
    found: dict[str, list[bool]] = {}
    for each in (False, True):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        found[str(each)] = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 2), 1.0 + RANK)).sum())
            found[str(each)].append(_agree(accelerator, model))
            if accelerator.sync_gradients:
                model.zero_grad()
    return found


def triggered_exchange() -> list[bool]:
    """Whether gradients agree after two backward passes, the second in the trigger's context."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with accelerator.no_sync(model):
        losses = [model(torch.full((1, 2), 1.0 + RANK)).sum() for _ in range(2)]
    accelerator.backward(losses[0])
    found = [_agree(accelerator, model)]
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    return [*found, _agree(accelerator, model)]


def _agree(accelerator: Accelerator, model: torch.nn.Module) -> bool:
    gathered = accelerator.gather([one.grad[None] for one in model.parameters()])  # type: ignore[index]
    return all(bool((one == one[:1]).all()) for one in gathered)


def models_for_evaluation() -> str:
    model: Any = torch.nn.Linear(1, 1)
    return type(Accelerator().prepare_model(model, evaluation_mode=True)).__name__


def compiled_models() -> dict[str, Any]:
    """Whether a compiled model's gradients agree, and its weights' names, whole and in regions."""
    found: dict[str, Any] = {}
    for regional in (False, True):
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
        accelerator = Accelerator(dynamo_plugin=plugin, mixed_precision="bf16")
        blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(2)]
        model = accelerator.prepare(torch.nn.Sequential(*blocks))
        accelerator.backward(model(torch.full((1, 2), 1.0 + RANK)).sum())
        found[str(regional)] = [
            _agree(accelerator, model),
            list(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()),
        ]
    return found


def traces() -> list[str]:
    accelerator = Accelerator()
    folder = FOLDER / f"traces{WORLD}"
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))):
        torch.ones(2) + 1
    return sorted(one.name for one in folder.iterdir())


def formed_group() -> list[Any]:
    """The timeout, backend and size of a new group that the handler describes; the last check."""
    Accelerator().end_training()
    place = f"file://{FOLDER / f'meeting{WORLD}'}"
    handler = InitProcessGroupKwargs("gloo", init_method=place, timeout=timedelta(seconds=55))
    accelerator = Accelerator(kwargs_handlers=[handler])
    size = accelerator.reduce(torch.ones(1)).item()
    return [_timeout(), accelerator.state.backend, size] if WORLD > 1 else []
