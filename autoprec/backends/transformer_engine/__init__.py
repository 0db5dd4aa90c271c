"""``transformer_engine``: NVIDIA's linear layers, run on the model's own Parameters."""
