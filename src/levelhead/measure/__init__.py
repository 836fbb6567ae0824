"""Measures on tensors, one question a file."""
