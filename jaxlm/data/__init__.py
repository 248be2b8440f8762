"""Sources of documents, the token store, and batches as a function of seed and step."""
