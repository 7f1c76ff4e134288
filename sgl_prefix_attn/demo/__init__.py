"""The demonstration: a real SGLang server, a workload of shared prompts, and the stock backend to compare with."""
