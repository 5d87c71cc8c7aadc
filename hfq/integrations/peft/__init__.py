"""LoRA on models with quantized weights, through PEFT."""
