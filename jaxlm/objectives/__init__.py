"""Training objectives: losses and metrics as pairs of a sum and a weight."""
