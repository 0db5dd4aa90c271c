"""Model and Plan → the same model, converted, and its receipt."""
