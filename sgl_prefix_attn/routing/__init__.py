"""The choice of kernels for a decode step, packed or the stock backend's, by predicted cost.

`features` describes a step before it is planned, `cost` predicts times from that, `profile` holds measured
coefficients, `policy` decides. `conservative` is the rule without a profile. `calibration` fits profiles to benchmark
results and evaluates policies.
"""
