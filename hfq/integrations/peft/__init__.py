"""LoRA next to quantized weights, through PEFT."""
