"""Diffs for published SGLang wheels; data only, read by `sgl_prefix_attn.patching`."""
