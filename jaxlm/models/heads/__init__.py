"""Heads of tasks, one file for each form. `head.py` has what they share."""
