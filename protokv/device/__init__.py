"""The device: captured calls (`runs`), attention kernels (`kernels`), how slots and answers lie
(`slots`, `answers`), operations on rows (`arrays`)."""
