"""Initialisers on tensors."""
