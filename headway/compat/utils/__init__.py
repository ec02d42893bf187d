"""Names of `accelerate.utils`."""

from headway.compat.forwarding import forward

# an import makes it an attribute, which would hide the function `tqdm`
from headway.compat.utils import tqdm as tqdm

del tqdm

__getattr__, __dir__ = forward(__name__)
