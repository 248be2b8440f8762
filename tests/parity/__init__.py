"""Statements of the same mathematics that share no code with jaxlm, and the scripts that freeze their numbers."""
