"""Files, hashes, waiting, interrupts: what any folder may use, and that uses none."""
