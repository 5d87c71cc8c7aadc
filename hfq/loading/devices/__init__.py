"""Devices that store a model's weights, and devices that compute with them."""
