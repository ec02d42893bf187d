"""The table of settings, the layers that set them, profiles, and checks of their values.
Imported by the launcher, the commands, the questionnaire and the runtime.
"""
