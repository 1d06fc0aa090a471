"""ReKV (Di et al., ICLR 2025): every token kept outside the device, and blocks of them retrieved for each question."""
