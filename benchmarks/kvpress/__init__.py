"""Which tokens our policies keep, beside NVIDIA's kvpress on the same queries, keys and values."""
