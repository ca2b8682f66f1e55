"""How a step is computed on the devices: one interface, one file per implementation."""
