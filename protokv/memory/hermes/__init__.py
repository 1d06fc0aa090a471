"""HERMES: exact tokens ranked by recency in shallow layers, and by the attention of pseudo queries in deep ones."""
