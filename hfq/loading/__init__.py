"""Loading of quantized checkpoints through `from_pretrained`."""
