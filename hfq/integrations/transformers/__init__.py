"""Hooks into transformers."""
