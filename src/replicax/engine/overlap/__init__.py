"""Sums of gradients that overlap with the backward pass."""
