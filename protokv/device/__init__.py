"""The device: captured calls (`graphs`), attention kernels (`kernels`), operations on rows
(`arrays`)."""
