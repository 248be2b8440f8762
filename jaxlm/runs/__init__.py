"""The files of a run: its directory, checkpoints, metrics and what it prints."""
