"""autoprec finds the fastest precision mix that keeps a PyTorch model's loss, and carries it as one JSON file."""

__version__ = "0.1.0"
