"""Compiles models, whole or block by block, and finds the model in a compiled one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from headway.errors import UsageError, did_you_mean
from headway.plugins.handlers import TorchDynamoPlugin


def compiled(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
    """Return `model` compiled as `plugin` says; one that is compiled already as it is.

    Blocks are compiled in place: weights keep their names, and `model` is returned itself. A model
    that repeats no block is compiled whole.
    """
    if not plugin.compiles or uncompiled(model) is not model:
        return model
    blocks = list(repeated_blocks(model)) if plugin.use_regional_compilation else []
    if compile_blocks(blocks, plugin):
        return model
    arguments = plugin.to_kwargs()
    _require_backend(arguments["backend"])
    return cast(torch.nn.Module, torch.compile(model, **arguments))


def compile_blocks(blocks: Sequence[torch.nn.Module], plugin: TorchDynamoPlugin) -> bool:
    """Compile blocks in place as `plugin` says; return whether there were any to compile."""
    if not plugin.compiles or not blocks:
        return False
    arguments = plugin.to_kwargs()
    _require_backend(arguments["backend"])
    compile_in_place(blocks, arguments)
    return True


def compile_in_place(modules: Iterable[torch.nn.Module], arguments: dict[str, Any]) -> None:
    """Compile what each module does when it is called, with code that equal modules share.

    `Module.compile()` does nothing for torch's own classes, such as Linear, whose frames dynamo
    skips; so this sets the private attribute that it would set.
    """
    call = torch.compile(_call, **arguments)
    for module in modules:
        module._compiled_call_impl = partial(call, module)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether `compile_in_place`, or `Module.compile()`, has compiled this module."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def repeated_blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return the outermost modules in lists of several that are all of one class."""
    members = list(model.children())
    is_list = isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)) and len(members) > 1
    if is_list and len({type(one) for one in members}) == 1:
        yield from members
    else:
        for one in members:
            yield from repeated_blocks(one)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that `torch.compile` was given, or `model` itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def _require_backend(backend: object) -> None:
    if not isinstance(backend, str):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        guess = did_you_mean(backend, known)
        raise UsageError(
            f"backend is {backend!r}, which torch.compile does not have",
            where="the script's dynamo_backend or TorchDynamoPlugin(...)",
            fix=f"did you mean {guess!r}?" if guess else f"pass one of {', '.join(known)}",
        )
