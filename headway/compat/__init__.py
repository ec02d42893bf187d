"""Accelerate's modules and names, and their behavior: `import headway.compat as accelerate`.

Objects that behave the same in both libraries come from Headway. Where Accelerate behaves
differently, this package follows Accelerate: for example, an LR scheduler steps once per rank.
"""

import sys

from headway.compat.forwarding import Finder, forward

__version__ = "1.15.0"
"""The version of Accelerate that this package follows."""

sys.meta_path.append(Finder())

__getattr__, __dir__ = forward(__name__)
