"""Stores, runs and batches as lines of text, for people to look at."""
