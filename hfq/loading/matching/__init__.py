"""Pairs stored tensors with the parameters of the model."""
