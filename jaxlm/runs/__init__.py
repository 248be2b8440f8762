"""Files of a run: its directory, checkpoints and metrics, and its console output."""
