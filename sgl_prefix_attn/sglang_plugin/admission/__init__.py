"""Which waiting request SGLang admits to its next prefill."""
