"""Every public name of Accelerate is here, or an error says what it was for and what to use."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

import pytest

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("torch")

from headway import compat  # noqa: E402
from headway.compat.forwarding import RUNTIME  # noqa: E402
from headway.migration.mapping import has, module_for  # noqa: E402
from headway.migration.missing import FEATURES, feature_of_member, feature_of_name  # noqa: E402

_NOT_THERE = ("accelerate.test_utils.", "accelerate.commands.")  # whose package says so
_RE_EXPORTING = ("accelerate", "accelerate.utils")


def modules() -> Iterator[types.ModuleType]:
    """Return Accelerate's modules that can be imported here."""
    yield accelerate
    for found in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if not found.name.startswith(_NOT_THERE):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield importlib.import_module(found.name)
            except ImportError:  # for a package that is not installed
                continue


def public_names(module: types.ModuleType) -> Iterator[str]:
    """Return the names that a module of Accelerate defines, or offers for others."""
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None)
        is_own = home == module.__name__ or (home is None and name.isupper())
        is_offered = module.__name__ in _RE_EXPORTING
        if isinstance(value, types.ModuleType) or name.startswith("_") or name == "TYPE_CHECKING":
            continue
        if is_own or is_offered:
            yield name


NAMES = [
    (module.__name__.removeprefix("accelerate").removeprefix("."), name)
    for module in modules()
    for name in public_names(module)
]


def is_there(module: str, name: str) -> bool:
    return has(module_for(module, [name]), name)


def is_class(name: str) -> bool:
    return name[0].isupper() and not name.isupper()


def test_every_class_and_every_name_of_the_runtime_is_here_or_is_refused() -> None:
    asked = [name for name in NAMES if name[0] in {"", *RUNTIME} or is_class(name[1])]
    unknown = [
        f"{module}.{name}"
        for module, name in asked
        if not is_there(module, name) and feature_of_name(module, name) is None
    ]
    assert len(NAMES) > 300
    assert not unknown


def test_no_name_is_said_to_be_missing_that_is_here() -> None:
    listed = {name for topic in FEATURES for name in topic.names}
    stale = [name for module, name in NAMES if name in listed and is_there(module, name)]
    assert not stale, "remove them from headway/migration/missing.py"


def test_no_name_is_missing_for_two_reasons() -> None:
    listed = [name for topic in FEATURES for name in topic.names]
    assert len(listed) == len({*listed})


def test_every_member_is_here_or_is_refused() -> None:
    members = [name for name in dir(accelerate.Accelerator) if not name.startswith("_")]
    ours = compat.Accelerator(cpu=True)
    missing = [name for name in members if not hasattr(ours, name)]
    assert len(members) > 80
    assert not [name for name in missing if feature_of_member(name) is None]


def test_a_module_of_accelerate_has_a_module_of_the_same_name() -> None:
    names = [module.__name__.replace("accelerate", "headway.compat", 1) for module in modules()]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    assert set(missing) <= {"headway.compat.data_loader"}


def test_modules_of_a_package_are_those_of_compat_also_as_attributes() -> None:
    from headway.compat import utils

    found = vars(utils) | {name: getattr(utils, name) for name in ("memory", "operations")}
    modules = {value.__name__ for value in found.values() if isinstance(value, types.ModuleType)}
    assert modules >= {"headway.compat.utils.memory", "headway.compat.utils.operations"}
    ours = {module for module in modules if module.startswith("headway")}
    assert all(name.startswith("headway.compat.utils.") for name in ours)


def test_the_version_is_that_of_the_accelerate_it_was_compared_with() -> None:
    assert compat.__version__.split(".")[:2] == accelerate.__version__.split(".")[:2]


def test_what_is_the_same_is_the_same_object() -> None:
    import headway.compat as spoken
    from headway import DistributedType
    from headway.compat.utils import set_seed
    from headway.compat.utils.random import set_seed as from_its_file  # type: ignore[import-not-found]
    from headway.utils import set_seed as native

    assert set_seed is native
    assert from_its_file is native
    assert spoken.utils.set_seed is native
    assert spoken.DistributedType is DistributedType
    assert "set_seed" in dir(spoken.utils)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("headway", "DeepSpeedPlugin", "DistributedDataParallel"),
        ("headway.utils", "ParallelismConfig", "DistributedDataParallel"),
        ("headway.compat", "prepare_pippy", "torch.distributed.pipelining"),
        ("headway.compat.utils", "BnbQuantizationConfig", "BitsAndBytesConfig"),
        ("headway.compat.local_sgd", "LocalSGD", "PostLocalSGDOptimizer"),
        ("headway.compat.big_modeling", "init_empty_weights", "device_map"),
        ("headway.compat.utils.megatron_lm", "GPTTrainStep", "Megatron-LM"),
        ("headway", "set_seed", "from headway.utils import set_seed"),
    ],
)
def test_importing_a_missing_name_says_what_to_use_instead(
    module: str, name: str, words: str
) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}", {})  # noqa: S102  an import statement is the case
    assert name in str(caught.value)
    assert words in str(caught.value)
    assert not hasattr(importlib.import_module(module), name)


def test_using_a_missing_name_says_what_to_use_instead() -> None:
    with pytest.raises(AttributeError, match="has no counterpart in Headway"):
        _ = compat.DeepSpeedPlugin


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match=r"cannot import name 'acclerator' from 'headway'"):
        exec("from headway import acclerator", {})  # noqa: S102
    with pytest.raises(AttributeError, match="no attribute 'acclerator'"):
        _ = compat.acclerator


def test_a_missing_member_says_what_to_use_instead() -> None:
    from headway import Accelerator

    accelerator = Accelerator(cpu=True)
    assert not hasattr(accelerator, "lomo_backward")
    with pytest.raises(AttributeError, match="has no counterpart in Headway"):
        accelerator.lomo_backward(None, 0.1)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="object has no attribute 'foo'"):
        _ = accelerator.foo  # type: ignore[attr-defined]


@pytest.mark.processes
def test_importing_the_package_or_looking_for_a_name_imports_neither_torch_nor_accelerate() -> None:
    code = """
import sys, headway
from headway import compat, errors
assert not hasattr(headway, "set_seed") and not hasattr(headway, "DeepSpeedPlugin")
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "accelerate"} & {*done.stdout.split()}


@pytest.mark.processes
def test_a_module_that_is_there_before_torch_does_not_come_in_the_way_of_its_import() -> None:
    code = """
import headway.compat.utils, headway.compat.tracking, headway.compat.state
from headway.compat.tracking import WandBTracker
assert not hasattr(headway.compat.state, "__file__")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
