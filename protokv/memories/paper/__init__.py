"""The paper's memory: its rule (Algorithms 1 and 2), its residuals (Algorithm 3) and its
settings.
"""
