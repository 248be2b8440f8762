"""Readers of lines, tables, JSON and columns: one for each format, whatever the rows are read for."""
