"""Loads one slice of each layer per rank."""
