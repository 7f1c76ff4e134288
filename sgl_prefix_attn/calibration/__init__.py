"""Measures and fits routing profiles: `python -m sgl_prefix_attn calibrate`.

`fit` and `margins` turn measured steps into costs, `sources` gathers the steps from results files, `judge` evaluates
policies over them.
"""
