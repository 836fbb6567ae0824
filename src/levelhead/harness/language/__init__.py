"""Causal language models as recipes describe them: documents, tokens, windows, the task."""
