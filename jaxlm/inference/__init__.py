"""Inference with trained models: predictions, generated text, scores and activations."""
