"""Tells as JSON all that a script can see of how it was started; run by test_fidelity.py."""
# mypy: ignore-errors

import atexit
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings

METHODS = os.environ.pop("START_METHODS", "").split()
before_torch = {
    "warnings.filters": list(map(str, warnings.filters)),
    "torch and numpy": sorted(n for n in sys.modules if n.split(".")[0] in ("torch", "numpy")),
}

import torch  # noqa: E402

after_torch = {"warnings.filters after torch": list(map(str, warnings.filters))}

from torch.utils.data import DataLoader, Dataset  # noqa: E402


class Item:
    """Defined in __main__; has to survive pickling."""

    def __init__(self, value):
        self.value = value


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Item(index)


def first(items):
    return items[0].value


def square(value):
    return value * value


def loaded_by(method):
    loader = DataLoader(Numbers(), num_workers=1, collate_fn=first, multiprocessing_context=method)
    return list(loader)


def pooled_by(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(square, [1, 2, 3])


def of_processes():
    """Each start method gives the same."""
    return {str([loaded_by(method), pooled_by(method)]): "of processes" for method in METHODS}


def stream(name):
    one = getattr(sys, name)
    return {
        "fileno": one.fileno(),
        "encoding": one.encoding,
        "errors": one.errors,
        "mode": one.mode,
        "name": one.name,
        "line_buffering": one.line_buffering,
        "same as original": one is getattr(sys, f"__{name}__"),
        "isatty": one.isatty(),
        "type": type(one).__name__,
        "buffer": type(one.buffer).__name__,
    }


def own_start_method():
    multiprocessing.set_start_method("spawn")  # unforced: fails if somebody set one before
    return multiprocessing.get_start_method()


def signals():
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGUSR1", "SIGQUIT", "SIGXFSZ")
    return {name: str(signal.getsignal(getattr(signal, name))) for name in names}


def main():
    module = sys.modules["__main__"]
    spec = module.__spec__
    told = {
        **before_torch,
        **after_torch,
        "sys.argv": sys.argv,
        "sys.path": sys.path,
        "sys.flags": str(sys.flags),
        "sys.executable": sys.executable,
        "sys.orig_argv": sys.orig_argv,
        "sys.meta_path": [getattr(x, "__name__", type(x).__name__) for x in sys.meta_path],
        "sys.excepthook": sys.excepthook is sys.__excepthook__,
        "__name__": __name__,
        "__file__": __file__,
        "__package__": __package__,
        "__doc__": __doc__,
        "__spec__": None if spec is None else [spec.name, spec.origin],
        "__loader__": type(__loader__).__name__,
        "__main__ names": sorted(name for name in vars(module) if name.startswith("__")),
        "__main__ is real": module.__dict__ is globals() and module.Item is Item,
        "cwd": os.getcwd(),
        "streams": {name: stream(name) for name in ("stdin", "stdout", "stderr")},
        "stdin": sys.stdin.read(),
        "signals": signals(),
        "blocked signals": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "parent_process": str(multiprocessing.parent_process()),
        "process name": multiprocessing.current_process().name,
        "default start method": multiprocessing.get_start_method(allow_none=True),
        "own start method": own_start_method(),
        "thread": threading.current_thread() is threading.main_thread(),
        "thread name": threading.main_thread().name,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "pickled": pickle.loads(pickle.dumps(Item(3))).value,
        **({} if os.environ.get("RANK") == "1" else of_processes()),
        "subprocess": subprocess.run(
            [sys.executable, "-c", "print('child')"], capture_output=True, text=True
        ).stdout,
        "inherited files": sorted(
            fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_inheritable(fd)
        ),
        "torch threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "umask": os.umask(0o22),
        "nice": os.nice(0),
        "gc": __import__("gc").get_threshold(),
        "own module": vars(__import__("csv")).get("own"),
        "recursion": sys.getrecursionlimit(),
        "trace": [type(hook).__name__ for hook in (sys.gettrace(), sys.getprofile())],
        "faulthandler": __import__("faulthandler").is_enabled(),
        "environ": {
            name: text for name, text in os.environ.items() if name not in ("_", "OLDPWD", "SHLVL")
        },
    }
    rank = os.environ.get("RANK", "0")
    atexit.register(lambda: print("atexit ran", flush=True))
    threading.Thread(target=late, args=(rank, told)).start()  # not a daemon: Python waits for it


def late(rank, told):
    threading.Event().wait(0.3)
    with open(f"probe_{rank}.json", "w") as file:
        json.dump(told, file)


def _is_inheritable(fd):
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


if __name__ == "__main__":
    main()
