"""Compares routing policies: over measured steps, and on a running server. `python -m sgl_prefix_attn abtest`."""
