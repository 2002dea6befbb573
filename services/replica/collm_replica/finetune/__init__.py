"""LoRA fine-tuning on shared base weights: data, trainer, gradient noise scale, aggregation."""
