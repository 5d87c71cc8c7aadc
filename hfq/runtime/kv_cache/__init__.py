"""KV cache in CPU memory or in files, onloaded layer by layer."""
