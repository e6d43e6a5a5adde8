"""A small inference engine in PyTorch and Triton in which every published technique is one switch."""
