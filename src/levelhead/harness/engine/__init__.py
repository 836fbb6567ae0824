"""One training on any number of devices, that survives being killed."""
