"""InfiniPot-V (Kim et al., NeurIPS 2025): exact tokens, compressed to a share of the budget whenever it is full."""
