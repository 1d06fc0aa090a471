"""The paper's memory: a near window and a bank of prototypes, with residual statistics."""
