"""Step times of replicax beside other libraries, in turns on one machine."""
