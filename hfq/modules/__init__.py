"""Modules that hold packed rows in the place of transformers' own."""
