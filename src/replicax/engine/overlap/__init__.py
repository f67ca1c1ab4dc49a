"""Sums of gradients that travel while the backward pass still computes."""
