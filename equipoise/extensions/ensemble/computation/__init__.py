"""Steps of several members computed side by side."""
