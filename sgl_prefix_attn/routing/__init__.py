"""The choice of kernels for a decode step, packed or the stock backend's, by a rule of a few thresholds.

`features` describes a step before it is planned, `policy` decides, `rule` is the default, `conservative` stands for it
where nothing was measured. `verify` and `mixed` decide these kinds of steps. `measured` reads measured steps.
"""
