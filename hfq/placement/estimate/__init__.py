"""Predicted memory and speed of a placement."""
