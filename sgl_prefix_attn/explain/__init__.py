"""`python -m sgl_prefix_attn explain`: what the planner makes of a batch, in words, numbers and a picture."""
