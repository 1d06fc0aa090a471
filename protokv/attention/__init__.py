"""Attention over a bounded context with a logit bias a slot, and over the exact tokens that come after it."""

from protokv.attention.fused import attend
from protokv.attention.hook import NAME, register
from protokv.attention.joint import attend_to
from protokv.attention.shares import shares
from protokv.attention.tail import Tail

__all__ = ["NAME", "Tail", "attend", "attend_to", "register", "shares"]
