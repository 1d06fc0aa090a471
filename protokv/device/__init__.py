"""The device: captured calls (`graphs`), attention kernels (`kernels`), how slots and answers lie
(`slots`, `answers`), operations on rows (`arrays`)."""
