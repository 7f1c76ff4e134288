"""Environments: `setup_env` for a source checkout, `cli` for SGLang on a CPU beside a wheel; `stages` of both."""
