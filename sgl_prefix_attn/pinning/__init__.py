"""Decides which prefixes a cache keeps: pins with a budget, and retention scores. Independent of SGLang."""

from sgl_prefix_attn.pinning.cached_tree import ROOT, CachedNode, CachedTree, NodeSpan
from sgl_prefix_attn.pinning.errors import PinBudgetError, UnknownPinError
from sgl_prefix_attn.pinning.keys import prefix_keys
from sgl_prefix_attn.pinning.ledger import Pin, PinLedger
from sgl_prefix_attn.pinning.lookahead import Lookahead
from sgl_prefix_attn.pinning.retention_score import RetentionScores
from sgl_prefix_attn.pinning.reuse import ReuseMemory
from sgl_prefix_attn.pinning.stored_prompts import StoredPrompt

__all__ = [
    "ROOT",
    "CachedNode",
    "CachedTree",
    "Lookahead",
    "NodeSpan",
    "Pin",
    "PinBudgetError",
    "PinLedger",
    "RetentionScores",
    "ReuseMemory",
    "StoredPrompt",
    "UnknownPinError",
    "prefix_keys",
]
