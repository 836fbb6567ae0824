"""Image classification as recipes describe it: sources, transforms, batches, the task."""
