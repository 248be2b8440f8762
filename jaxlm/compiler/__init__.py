"""Reads compiled programs: what a step costs on chips that are not here, by what the compiler of these chips says."""
