"""How prepared models are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headway.plugins.handlers import KwargsHandler


class DynamoBackend(str, Enum):
    """The usual backends of `torch.compile`; a name that torch has registered does as well.

    Examples:
        >>> from headway.utils import DynamoBackend, TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="eager").backend is DynamoBackend.EAGER
        True
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"

    def __str__(self) -> str:
        return self.value


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How prepared models are compiled with `torch.compile`.

    Args:
        backend: a `DynamoBackend`, the name of a backend that torch has registered (case does not
            matter for the usual ones), or a function; None and "no" do not compile.
        mode: "default", "reduce-overhead" or "max-autotune"; None is "default".
        fullgraph: whether a graph break is an error; None is False.
        dynamic: whether to compile for changing shapes; None lets torch find out.
        options: options of the backend, in place of a mode.
        disable: make `torch.compile` do nothing.
        use_regional_compilation: compile each block that the model repeats, such as a layer of a
            transformer, in place of the whole model: the code of one block serves for all.

    Examples:
        >>> from headway.utils import TorchDynamoPlugin
        >>> TorchDynamoPlugin(backend="inductor", dynamic=True).to_kwargs()
        {'backend': 'inductor', 'dynamic': True}
        >>> TorchDynamoPlugin(backend="inductor").to_dict()["backend"]
        'inductor'
    """

    backend: DynamoBackend | str | Callable[..., Any] | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.backend is None:
            self.backend = DynamoBackend.NO
        elif isinstance(self.backend, str) and self.backend.upper() in set(DynamoBackend):
            self.backend = DynamoBackend(self.backend.upper())

    @property
    def compiles(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields, the backend as torch calls it."""
        found = super().to_dict()
        if isinstance(self.backend, DynamoBackend):
            found["backend"] = self.backend.value.lower()
        return found

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from their defaults."""
        found = super().to_kwargs()
        found.pop("use_regional_compilation", None)
        return found
