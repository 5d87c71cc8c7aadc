"""Predicted memory and time of a placement."""
