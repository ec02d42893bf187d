"""`pytest --reworded`: every message and reason reads differently, and nothing else may change.

The product does not know about it: its modules are changed when they are imported, here and in
every Python that a test starts (by `site/sitecustomize.py`).
"""
