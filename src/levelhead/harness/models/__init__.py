"""Two small Transformers built on ``levelhead.attention.Attention``, for demos and recipes."""
