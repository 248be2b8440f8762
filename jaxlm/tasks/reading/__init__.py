"""Readers of labelled files and of TFDS data sets."""
