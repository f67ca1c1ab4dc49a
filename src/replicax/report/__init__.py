"""Training reports: what a run of `fit` did, and where its time went."""
