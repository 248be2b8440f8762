"""From text to batches: sources of documents, the token store, and rows that are a function of seed and step."""
