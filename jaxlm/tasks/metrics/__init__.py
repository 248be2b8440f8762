"""Predictions from a model's outputs, and their metrics."""
