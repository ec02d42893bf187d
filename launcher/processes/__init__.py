"""Starts the ranks of this machine, and ends them with all that they have started.

Never reads what ranks print; why they failed is asked of `diagnosis`.
"""
