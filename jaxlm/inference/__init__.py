"""Trained models at work: predictions, generated text, scores and activations."""
