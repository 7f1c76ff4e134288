"""What to keep in a prefix cache: pins with a budget, and the worth of every cached prefix. Knows nothing of SGLang."""

from sgl_prefix_attn.pinning.cached_tree import ROOT, CachedNode, CachedTree, Stretch
from sgl_prefix_attn.pinning.errors import PinBudgetError, UnknownPinError
from sgl_prefix_attn.pinning.keys import prefix_keys
from sgl_prefix_attn.pinning.ledger import Pin, PinLedger
from sgl_prefix_attn.pinning.lookahead import Lookahead
from sgl_prefix_attn.pinning.reuse import ReuseMemory
from sgl_prefix_attn.pinning.worth import PrefixWorth

__all__ = [
    "ROOT",
    "CachedNode",
    "CachedTree",
    "Lookahead",
    "Pin",
    "PinBudgetError",
    "PinLedger",
    "PrefixWorth",
    "ReuseMemory",
    "Stretch",
    "UnknownPinError",
    "prefix_keys",
]
