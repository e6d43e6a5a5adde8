"""Layers, one file a kind; `build` knows which class serves which spec."""
