"""The engine of training: the state, the pure step, the loop, and the directory that a run lives in."""
