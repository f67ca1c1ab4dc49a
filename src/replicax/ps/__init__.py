"""Parameter servers: variables that live in other processes."""
