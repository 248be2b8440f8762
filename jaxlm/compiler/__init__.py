"""Readers of compiled programs, which estimate the cost of a step on absent chips from the output of their compiler."""
