"""What a run says: the output of its ranks, why they failed, where they hang. All of the launcher
comes in.
"""
