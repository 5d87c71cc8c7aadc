"""Recipes: how a float model is quantized, and the schemes that round to nearest."""
