"""`python -m sgl_prefix_attn explain`: the plan of a batch as text, numbers or a picture."""
