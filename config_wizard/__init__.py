"""Asks for a machine profile; never launches. (The questionnaire itself is not written yet.)"""
