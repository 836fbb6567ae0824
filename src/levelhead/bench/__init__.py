"""Benchmarks: each prints ratios measured in one process, so that machines can be compared."""
