"""Settings and machine become one frozen plan; pure. The commands and the later rooms of the
launcher come in.
"""
