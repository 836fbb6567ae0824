"""Stable, well-conditioned, visible attention for Transformers in PyTorch."""
