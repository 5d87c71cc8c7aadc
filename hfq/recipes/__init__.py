"""Recipes for quantizing a float model, and the schemes that round to nearest."""
