"""Plans: what a training step would do on other hardware: `replicax plan`, `rx.plan`.

Strategies take devices that are only described. Variables stay on this machine,
programs are traced and compiled for the described mesh, and handed to the plan in place
of being run; the plan reads the compiled program.
"""
