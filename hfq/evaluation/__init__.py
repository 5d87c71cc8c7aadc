"""Evaluation of loaded models: perplexity, divergence from a reference, and comparison."""
