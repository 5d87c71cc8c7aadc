"""Matching of stored tensors with the parameters of a model."""
