"""A report that compares runs: one HTML page that contains its scripts, styles and data and needs no network."""
