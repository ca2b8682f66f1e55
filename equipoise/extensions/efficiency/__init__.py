"""How well a run uses its devices: operations against the peak of the device, tokens and samples a second, energy."""
