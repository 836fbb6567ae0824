"""Where each library keeps its attention."""
