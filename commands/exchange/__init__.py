"""`headway config import` and `export`: settings of other tools, to and from ours."""
