"""Why ranks failed, and where they hang.

Never starts, stops or signals one, but to ask where it is.
"""
