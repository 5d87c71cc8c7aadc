"""Measures what a loaded model is worth."""
