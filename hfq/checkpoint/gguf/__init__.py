"""GGUF files: validated headers, block types, split files, and names of tensors."""
