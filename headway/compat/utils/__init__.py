"""Names of `accelerate.utils`."""

from importlib import import_module

from headway.compat.forwarding import forward

import_module(f"{__name__}.tqdm")  # an attribute from here on, which would hide the function
del globals()["tqdm"]

__getattr__, __dir__ = forward(__name__)
