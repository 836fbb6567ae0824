"""Attention in stages: tensors in, tensors out; siblings do not import each other."""
