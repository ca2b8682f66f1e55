"""Memory of a step, tensor by tensor, by module and phase."""
