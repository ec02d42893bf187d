"""A run as one page of HTML: its report, its curves, its phases, its memory, what has changed.

It holds all that it shows: no script, and nothing of the network.
"""

from __future__ import annotations
