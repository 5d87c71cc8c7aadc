"""Loads of GGUF files: their config, their unquantized tensors, and the files of a save."""
