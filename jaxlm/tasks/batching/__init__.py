"""Examples as token sequences, and these as batches."""
