"""The version of our kernels in results files and profiles, and the profiles that still predict these kernels."""

# Raised when a change of kernels or planner changes their costs. 2: the planner's queue model. 3: combines deferred to
# idle warps; WGMMA for head_dim 64 and 256 and for 8-bit KV. Steps that are short or have few warp tiles have become up
# to a tenth faster since. Profiles from before that have a regret of at most 2 % of all time on either GPU.
KERNELS_VERSION = 3
# Versions of profiles that are taken. An older one stays as long as its regret with the present kernels is small;
# servers say that they borrow it. The last one of version 2 that was shipped loses 0.8 % of all time on two seeds of an
# H200, and no step is behind the stock backend by more than 2 %.
TAKEN_VERSIONS = frozenset({2, 3})
UNRECORDED_VERSION = 1  # of results and profiles from before the version was written into them
