"""Layouts of text in rows, one class in one file each: its flags, its rows, its validation, and what others ask of it.

To add a layout, write its file after `windows.py` and add its class to the union in `jaxlm/data/config.py`. The classes
do not import JAX: their rows are imported when they are made.
"""
