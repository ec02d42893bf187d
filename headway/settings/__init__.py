"""What can be set and what holds: the table, its layers, profiles, and what is wrong with them.
The launcher, the commands, the questionnaire and the runtime may come in.
"""
