"""Routed experts that are read when they are needed."""
