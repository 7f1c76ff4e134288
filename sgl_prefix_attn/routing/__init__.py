"""Which kernel a decode step should run on: ours (packed) or the stock backend's, by predicted cost.

`features` says what is known of a step before it is planned, `cost` predicts times from that, `profile` holds the
measured coefficients, `policy` decides. `fit` makes profiles from benchmark results and `compare` judges them.
"""
