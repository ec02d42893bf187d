"""Accelerate's modules and names, as they behave there: `import headway.compat as accelerate`.

What is the same in Headway is the same object here. Where Accelerate behaves differently, this
package behaves as Accelerate does: the learning-rate schedule steps once for each rank.
"""

import sys

from headway.compat.forwarding import Finder, forward

__version__ = "1.15.0"
"""The version of Accelerate whose names and behaviour these are."""

sys.meta_path.append(Finder())

__getattr__, __dir__ = forward(__name__)
