"""Stores, runs and batches as human-readable lines of text."""
