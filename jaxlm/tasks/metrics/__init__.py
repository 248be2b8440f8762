"""Predictions from a model's outputs, and the metrics they are judged by."""
