"""Data, models, training and comparison: the experiments of the papers as recipes."""
