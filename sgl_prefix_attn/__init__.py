"""Shared-prefix attention for SGLang: `--attention-backend prefixpack`."""

__version__ = "0.1.0"
