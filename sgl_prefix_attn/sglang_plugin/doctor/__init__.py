"""`python -m sgl_prefix_attn doctor`: what of a server would run packed, found without starting it."""
