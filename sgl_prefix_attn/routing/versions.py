"""The version of our kernels in results files and profiles, and the profiles that still predict these kernels."""

# Raised when a change of kernels or planner changes their costs. 2: the planner's queue model. 3: combines deferred to
# idle warps; WGMMA for head_dim 64 and 256 and for 8-bit KV. Steps that are short or have few warp tiles have become up
# to a tenth faster since. Judged with that on both GPUs, the profiles have a regret of at most 2 % of all time.
KERNELS_VERSION = 3
# Versions of profiles that are taken. An older one stays as long as its regret on an acceptance run of the present
# kernels is small (tests/calibration/test_fit.py); servers say that they borrow it.
TAKEN_VERSIONS = frozenset({2, 3})
UNRECORDED_VERSION = 1  # of results and profiles from before the version was written into them
