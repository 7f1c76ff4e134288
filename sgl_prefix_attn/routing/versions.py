"""The version of our kernels in profiles."""

# Raised when a change of kernels or planner changes their costs. 2: the planner's queue model.
KERNELS_VERSION = 2
