"""EnsembleStrategy: several members of one class, trained side by side on one device."""
